"""Models with weights of 8 and 4 bits: against models whose weights are the dequantized ones, in the engine, and their loss on a text."""

import copy
from dataclasses import replace

import pytest
import torch
from allocations import Allocations
from architectures import ARCHITECTURES, model_of
from random_adapters import factors_of
from torch import nn

import penstock
from penstock.demo.text import python_topics
from penstock.engine import Engine, SamplingParams
from penstock.errors import DtypeError, RangeError
from penstock.layers import modes
from penstock.layers.adapted import adapted, chosen
from penstock.layers.chains import Choice, recorded
from penstock.layers.linear import Linear
from penstock.layers.mixer import Mixer
from penstock.layers.quantization import KINDS
from penstock.layers.quantized import QuantizedLinear
from penstock.models import CausalLM, delta_net, gla, load, mamba2, quantize, rwkv6, rwkv7, save

pytestmark = pytest.mark.sampled(file=True)

STATES_OF_FIXED_SIZE = [name for name, config in ARCHITECTURES.items() if not any(one.grows for one in config.mixers)]


def dequantized(model):
    """A model of plain linear maps with the weights that the codes stand for."""

    def plain(module):
        for name, child in module.named_children():
            if isinstance(child, QuantizedLinear):
                made = Linear(child.in_features, child.out_features, bias=child.bias is not None).to(child.dtype)
                made.weight = nn.Parameter(child.quantized.weight(child.in_features, child.dtype))
                made.bias = child.bias
                setattr(module, name, made)
            else:
                plain(child)
        return module

    return plain(copy.deepcopy(model))


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(name, kind):
    """Forward and token by token in place. The given model does not change."""
    model = model_of(name, torch.float64)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    one = quantize(model, kind)
    assert sum(isinstance(part, QuantizedLinear) for part in one.modules()) >= 5
    assert isinstance(one.head, QuantizedLinear)
    small = [part for part in one.modules() if isinstance(part, nn.Sequential)]  # low-rank maps, in these sizes of large ranks
    small += [getattr(part, name) for part in one.modules() for name in ("a_proj", "b_proj") if getattr(part, name, None) is not None]
    assert not any(isinstance(part, QuantizedLinear) for each in small for part in each.modules())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    ids = torch.randint(13, (2, 11), generator=torch.Generator().manual_seed(0))
    wanted = dequantized(one)(ids)
    torch.testing.assert_close(one(ids).logits, wanted.logits, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(wanted.logits, model(ids).logits, rtol=1e-4)
    pool = one.initial_state(2, max_length=16)
    steps = torch.cat([one.advance(ids[:, t : t + 1], pool) for t in range(11)], 1)
    torch.testing.assert_close(steps, wanted.logits, rtol=1e-9, atol=1e-9)


def test_small_maps_and_embeddings_are_kept():
    model = quantize(CausalLM(gla(vocab_size=13, hidden_size=64, num_layers=1, num_heads=4, intermediate_size=96)), "int8")
    kept = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    assert kept
    assert {name for name in kept if min(model.get_submodule(name).weight.shape) >= 64 / 4} == {
        f"layers.0.mixer.gk_proj.{n}" for n in (0, 1)
    }
    assert model.embeddings.weight.dtype == torch.float32


@pytest.mark.parametrize("name", STATES_OF_FIXED_SIZE)
def test_names_of_modules_that_are_kept(name, monkeypatch):
    model = model_of(name)
    for mixer in (one for one in model.modules() if isinstance(one, Mixer)):
        assert all(isinstance(getattr(mixer, part), nn.Module | None) for part in mixer.unquantized)
    kind = type(model.layers[0].mixer)
    for names, value in (
        (("q_projection",), "without a module q_projection"),
        ("q_projection", "with unquantized = 'q_projection'"),
        (None, "with unquantized = None"),
    ):
        monkeypatch.setattr(kind, "unquantized", names)
        with pytest.raises(RangeError, match=f"{kind.__name__} {value}") as raised:
            quantize(model, "int8")
        assert str(raised.value).count(value) == 1


def test_modules_of_a_module_are_kept_by_their_names(monkeypatch):
    model = model_of("gla")
    kind = type(model.layers[0].mixer)
    monkeypatch.setattr(kind, "unquantized", ("gk_proj.1", "q_proj"))
    found = quantize(model, "int8").layers[0].mixer
    assert not isinstance(found.q_proj, QuantizedLinear)
    assert not isinstance(found.gk_proj[1], QuantizedLinear)
    assert isinstance(found.k_proj, QuantizedLinear)


def test_maps_to_beta_that_are_left_out():
    config = delta_net(vocab_size=13, hidden_size=64, num_layers=1, num_heads=2, intermediate_size=96)
    model = CausalLM(replace(config, mixer=replace(config.mixer, use_beta=False)))
    assert isinstance(quantize(model, "int8").layers[0].mixer.q_proj, QuantizedLinear)


def test_heads_that_are_tied_get_a_copy(tmp_path):
    model = CausalLM(mamba2(vocab_size=13, hidden_size=32, num_layers=1, head_dim=8, state_size=8, tie_embeddings=True))
    one = quantize(model, "int4")
    assert one.embeddings.weight is model.embeddings.weight
    save(model, tmp_path / "model")
    again = load(tmp_path / "model", quantize="int4")
    assert torch.equal(again.head.codes, one.head.codes)
    assert torch.equal(again.embeddings.weight, model.embeddings.weight)
    again.tie()
    assert isinstance(again.head, QuantizedLinear)


@pytest.mark.parametrize("name", STATES_OF_FIXED_SIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_load_quantizes(name, kind, tmp_path):
    model = model_of(name)
    save(model, tmp_path / "model")
    found, wanted = load(tmp_path / "model", quantize=kind), quantize(model, kind)
    assert not found.training
    assert found.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(x, wanted.state_dict()[key]) for key, x in found.state_dict().items())
    assert load(tmp_path / "model", quantize=kind, dtype=torch.bfloat16).head.dtype == torch.bfloat16


def test_load_has_one_large_weight_at_a_time(tmp_path):
    """The peak of the memory is that of the quantized model and of a few copies of its largest matrix."""
    config = gla(vocab_size=64, hidden_size=64, num_layers=24, num_heads=2, intermediate_size=128)
    save(CausalLM(config), tmp_path / "model")
    with Allocations() as plain:
        model = load(tmp_path / "model", dtype=torch.bfloat16)
    del model
    for kind, bits in (("int8", 8), ("int4", 4.5)):
        with Allocations() as found:
            model = load(tmp_path / "model", dtype=torch.bfloat16, quantize=kind)
        maps = [one for one in model.modules() if isinstance(one, QuantizedLinear)]
        weights, largest = (function(one.in_features * one.out_features for one in maps) for function in (sum, max))
        assert found.peak <= plain.peak - weights * (16 - bits) / 8 + 10 * 4 * largest


@pytest.mark.parametrize("name", STATES_OF_FIXED_SIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_engine(name, kind):
    """Tokens of a request do not depend on the others, and log probabilities not in a single bit."""
    prompts, params = [[1, 2, 3], [5], list(range(12)) * 6], SamplingParams(max_tokens=5, temperature=0, logprobs=1)
    with Engine(model_of(name), slots=4, batch_invariant=True, quantize=kind) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([one], params)[0] for one in prompts]
    assert [one.completions[0].tokens for one in together] == [one.completions[0].tokens for one in alone]
    assert [one.completions[0].logprobs for one in together] == [one.completions[0].logprobs for one in alone]


@torch.no_grad()
def test_states_of_other_kinds_of_weights_are_refused(tmp_path):
    model, params = model_of("rwkv7"), SamplingParams(max_tokens=2, keep_state=True)
    with Engine(model, slots=2) as engine, Engine(model, slots=2, quantize="int8") as other:
        state = engine.generate([[1, 2]], params)[0].completions[0].state
        with pytest.raises(RangeError, match="model"):
            other.submit([3], params, state=state)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rwkv6", "rwkv7", "gla", "mamba2"])
def test_adapters_on_quantized_weights(name, kind):
    one, ids = quantize(model_of(name, torch.float64), kind), torch.tensor([[1, 2, 3, 4]])
    factors = factors_of(model_of(name, torch.float64), 3, 0)
    with chosen(torch.zeros(4, dtype=torch.int64)):
        found = adapted(one, {"a": factors})(ids).logits
        wanted = adapted(dequantized(one), {"a": factors})(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found, one(ids).logits, rtol=1e-2)
    torch.testing.assert_close(adapted(one, {"a": factors})(ids).logits, one(ids).logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decode_steps_in_graphs_read_codes(name, kind, kernels_on_a_cpu, no_native_kernels):
    """No weight is dequantized; maps that may share a launch do."""
    one = quantize(model_of(name, torch.float16), kind)
    pool = one.initial_state(2, max_length=8)
    with recorded(one) as found, modes.in_graph():
        logits = one.advance(torch.tensor([[1], [2]]), pool)
    wanted = dequantized(one).advance(torch.tensor([[1], [2]]), one.initial_state(2, max_length=8))
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.05)
    chains = [choice for choice in found if isinstance(choice, Choice)]
    assert {choice.form for choice in chains if choice.chain == "quantized_linear"} <= {"products"}
    together = {choice.form for choice in chains if choice.chain in ("linears", "linears_of")}
    assert together <= {"quantized", "products"}
    assert "quantized" in together or not together


def test_explain_shows_them():
    text = str(penstock.explain(quantize(model_of("rwkv7"), "int8"), tokens=1, mode="decode"))
    assert "quantized_linear" in text


@pytest.mark.parametrize("model", [None, nn.Linear(3, 4)])
def test_other_models_are_refused(model):
    with pytest.raises(DtypeError, match="quantize: model must be a CausalLM, got "):
        quantize(model, "int8")


def test_wrong_kinds_are_refused(tmp_path):
    with pytest.raises(RangeError, match="quantize: kind must be one of int8, int4, got 'int3'"):
        quantize(model_of("gla"), "int3")
    with pytest.raises(DtypeError, match="load: quantize must be one of int8, int4, got "):
        load(tmp_path, quantize=8)
    with pytest.raises(RangeError, match="Engine: quantize must be one of int8, int4, got 'fp8'"):
        Engine(model_of("gla"), quantize="fp8")
    with pytest.raises(DtypeError, match="Engine: quantize must be one of int8, int4, got 4 of type int"):
        Engine(model_of("gla"), quantize=4)


def test_what_cannot_be_quantized_is_refused(tmp_path):
    model = model_of("gla")
    one = quantize(model, "int8")
    with pytest.raises(RangeError, match="quantize: model must be one with unquantized weights, got weights of int8"):
        quantize(one, "int4")
    with pytest.raises(RangeError, match="save: model must be one with unquantized weights, got weights of int8"):
        save(one, tmp_path / "model")
    served = adapted(model, {"a": factors_of(model, 3, 0, ["q_proj"])})
    with pytest.raises(RangeError, match=r"without hooks and adapters, got layers\.0\.mixer\.q_proj, which is a Adapted"):
        quantize(served, "int8")
    hooked = model_of("gla")
    hooked.head.register_forward_hook(lambda *_: None)
    with pytest.raises(RangeError, match="got head, which has a forward hook"):
        quantize(hooked, "int8")
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(RangeError, match=r"quantize: head\.weight must be finite to be quantized, got NaN or infinity"):
        quantize(model, "int8")
    save(model, tmp_path / "model")
    with pytest.raises(RangeError, match=r"load: head\.weight must be finite to be quantized"):
        load(tmp_path / "model", quantize="int4")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_beyond_float32_are_refused(kind):
    """Scales would be infinite."""
    model = model_of("gla", torch.float64)
    with torch.no_grad():
        model.head.weight[0, 0] = 1e300
    with pytest.raises(RangeError, match=r"quantize: head\.weight must be in the range of float32 to be quantized, got 1e\+300"):
        quantize(model, kind)


@pytest.fixture(params=[rwkv6, rwkv7], ids=lambda one: one.__name__)
def trained(request):
    """A small model, trained for some seconds on bytes of a text; and another part of the text."""
    text = torch.frombuffer(bytearray(python_topics()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = CausalLM(request.param(vocab_size=256, hidden_size=64, num_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(60):
        begins = torch.randint(len(text) * 9 // 10, (8,)).tolist()
        tokens = torch.stack([text[begin : begin + 65] for begin in begins])
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), text[-2049:]


def test_perplexity_of_a_trained_model(trained):
    """The perplexity changes by less than 0.5 % with 8 bits, and by less than 5 % with 4 bits."""
    (model, text), losses = trained, {}
    for kind in ("", *KINDS):
        one = quantize(model, kind) if kind else model
        with torch.no_grad():
            losses[kind] = float(one.loss(text[None, :-1], text[None, 1:]))
    print(losses)
    assert losses[""] < 3.2
    assert abs(losses["int8"] - losses[""]) < 0.005
    assert abs(losses["int4"] - losses[""]) < 0.05
