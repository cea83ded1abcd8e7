"""``penstock.explain`` of a model: the chains of every architecture, their kernels, and the reasons of modules with hooks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of

import penstock as ps
from penstock.gpu.target import interpreting
from penstock.layers import Mixer
from penstock.layers.chains import CHAINS, NOTHING_RAN, Choice, Operation, recorded
from penstock.models import CausalLM

MODES = ("training", "prompt", "decode")
pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]


def kept(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_call_of_a_chain_is_explained(name, mode):
    model = model_of(name)
    before = kept(model)
    found = ps.explain(model, tokens=3, mode=mode)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    text = str(found)
    assert "tokens=3, float32 on cpu\n" in text
    names = dict(model.named_modules())
    for one in found.choices:
        assert one.module in names
        if isinstance(one, Operation):
            assert one.explanation.call in text
            continue
        chain = CHAINS[one.chain]
        forms = [form.name for form in chain.forms]
        assert [form for form, _ in one.reasons] == forms[: forms.index(one.form)]
        assert f"{one.chain} runs {one.form}" in text
        assert all(f"{form}: " in text or f"{form}, " in text for form, _ in one.reasons)
        assert all(why in text for _, why in one.reasons)
    operations = [one for one in found.choices if isinstance(one, Operation)]
    mixers = sum(1 for layer in model.layers for one in [layer.mixer] if type(one).__name__ != "WindowMean")
    fused = sum(1 for one in found.choices if isinstance(one, Choice) and one.chain in ("rwkv_step", "rwkv7_step") and one.form != "parts")
    assert len(operations) == mixers - fused


@pytest.fixture
def launched(monkeypatch, kernels_on_a_cpu, no_native_kernels):
    """The names of the kernels that ran."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    names, whole = [], interpreter.InterpretedFunction.run

    def run(self, *given, **options):
        names.append(self.__name__)
        return whole(self, *given, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return names


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("mode", "dtype"), [*((mode, torch.float32) for mode in MODES), ("decode", torch.float16)], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_kernels_of_an_explanation_are_those_that_run(name, mode, dtype, launched):
    model = model_of(name, dtype)
    found = ps.explain(model, tokens=3, mode=mode)
    if mode == "training":
        ids = torch.zeros(1, 3, dtype=torch.int64)
        launched.clear()
        model.loss(ids, ids).backward()
    assert found.kernels == set(launched)
    assert launched


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_hook_changes_the_forms_of_its_module_alone(name, mode):
    model = model_of(name)
    plain, named = ps.explain(model, tokens=3, mode=mode).choices, set()
    for place, module in model.named_modules():
        if not f"{place}.".startswith("layers.0."):
            continue
        handle = module.register_forward_hook(lambda *given: None)
        hooked = ps.explain(model, tokens=3, mode=mode).choices
        handle.remove()
        for part, others in zip(by_layer(plain), by_layer(hooked), strict=True):
            if part != others:
                assert others[0].module.startswith("layers.0"), place
                first = next(one for one, other in zip(others, part) if one != other)
                assert isinstance(first, Choice)
                unstepped = any(why == NOTHING_RAN for _, why in first.reasons)  # the modules in its place say why
                reasons = [why for one in (others if unstepped else [first]) if isinstance(one, Choice) for _, why in one.reasons]
                assert any("has a forward hook" in why for why in reasons), place
                named.add(type(module))
    assert any(kind.__name__.endswith("Norm") for kind in named)
    if mode != "training":
        assert {type(model.layers[0]), type(model.layers[0].mixer)} <= named or type(model.layers[0].mixer).step is Mixer.step


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith(("rwkv5", "rwkv6"))])
def test_forms_that_found_no_kernel_are_not_those_that_run(name, kernels_on_a_cpu):
    """A mixer's step runs if its chains have kernels: not on a CPU, and not with a hook on the norm."""
    found = {}
    for place in ("", "mixer_norm"):
        model = model_of(name)
        if place:
            getattr(model.layers[0], place).register_forward_hook(lambda *given: None)
        choices = [one for one in ps.explain(model, tokens=3, mode="decode").choices if isinstance(one, Choice)]
        found[place] = next(one for one in choices if one.chain == "update_mixer")
        assert [one.chain for one in choices].count("update_mixer") == 2 * len(model.layers)
    assert (found[""].form, found[""].reasons) == ("step", ())
    assert (found["mixer_norm"].form, found["mixer_norm"].reasons) == ("modules", (("step", NOTHING_RAN),))


def by_layer(choices):
    return [list(found) for _, found in groupby(choices, lambda one: one.module.split(".")[:2])]


def test_equal_layers_are_merged():
    model = model_of("gla", num_layers=4)
    titles = [title for title, _ in ps.explain(model, tokens=3).layers]
    assert titles == ["layers 0 to 3", "model"]
    model.layers[2].mixer.norm.register_forward_hook(lambda *given: None)
    found = ps.explain(model, tokens=3)
    assert [title for title, _ in found.layers] == ["layers 0 to 1", "layer 2", "layer 3", "model"]
    assert "formula: the norm has a forward hook" in str(found)


@pytest.mark.parametrize("mode", MODES)
def test_layers_mixers_and_wrappers_are_explained(mode, no_native_kernels):
    """Without native kernels a channel mix in a layer has the chains that it has alone; with them its norm is part of a step."""
    model = model_of("rwkv6")
    whole = ps.explain(model, tokens=3, mode=mode)
    for part, within in ((model.layers[0], "layers.0."), (model.layers[0].channel, "layers.0.channel.")):
        found = ps.explain(part, tokens=3, mode=mode)
        chains = {one.chain for one in found.choices if isinstance(one, Choice)}
        assert chains
        assert chains <= {one.chain for one in whole.choices if isinstance(one, Choice) and f"{one.module}.".startswith(within[:9])}
    wrapped = torch.nn.Sequential(model)
    assert [one._replace(module="") for one in ps.explain(wrapped, tokens=3, mode=mode).choices] == [
        one._replace(module="") for one in whole.choices
    ]


@pytest.mark.parametrize("mode", MODES)
def test_models_of_transformers_are_explained(mode):
    huggingface = pytest.importorskip("penstock.models.huggingface")
    model = huggingface.PenstockForCausalLM.of(model_of("gla"))
    found = ps.explain(model, tokens=3, mode=mode)
    assert "layers 0 to 1" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "evaluation"}, "explain: mode must be 'training', 'prompt' or 'decode', got 'evaluation'"),
        ({"tokens": 0}, "explain: tokens must be a whole number of at least 1, got 0"),
        ({"tokens": 2.5}, "explain: tokens must be a whole number, got 2.5 of type float"),
        ({"mode": 3}, "explain: mode must be 'training', 'prompt' or 'decode', got 3 of type int"),
        ({"mode": torch.ones(2)}, "explain: mode must be 'training', 'prompt' or 'decode', got .* of type Tensor"),
        ({"token": 8}, r"explain: arguments must be among model, tokens, mode, got token\. Did you mean tokens\?"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ps.InvalidArgument, match=message):
        ps.explain(model_of("gla"), **options)


def test_keywords_of_functions():
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ps.RangeError, match=r"explain: arguments must be among q, .*, got initial_stat\. Did you mean initial_state\?"):
        ps.explain("linear_attention", q, q, q, initial_stat=None)
    with pytest.raises(ps.RangeError, match=r"explain: function must be one of linear_attention, .* or a model, a layer or a mixer, got 3"):
        ps.explain(3)


@pytest.mark.parametrize("mode", MODES)
def test_inference_mode_and_disabled_gradients_change_nothing(mode):
    model = model_of("rwkv6")
    wanted = ps.explain(model, tokens=3, mode=mode)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert ps.explain(model, tokens=3, mode=mode) == wanted


def test_a_form_that_raises_while_it_is_asked_ends_the_recording(monkeypatch):
    """Later calls are not recorded."""
    model = model_of("gla")
    broken = replace(CHAINS["add_norm"].forms[0], refuses=lambda call: 1 / 0)
    monkeypatch.setattr(CHAINS["add_norm"], "forms", (broken, *CHAINS["add_norm"].forms[1:]))
    with pytest.raises(ZeroDivisionError):
        ps.explain(model, tokens=3)
    monkeypatch.undo()
    with recorded(model) as found:
        pass
    model(torch.zeros(1, 2, dtype=torch.int64))
    assert found == []


def test_threads_explain_their_own_models():
    models = [model_of(name) for name in ("gla", "rwkv6", "mamba2", "gla")]
    wanted = [ps.explain(model, tokens=3) for model in models]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda model: ps.explain(model, tokens=3), models)) == wanted


def test_wrong_models():
    with pytest.raises(ps.DtypeError, match=r"explain: model must be a CausalLM, a mixer or a layer, .* got Linear"):
        ps.explain(torch.nn.Linear(3, 3))
    with torch.device("meta"):
        model = CausalLM(ARCHITECTURES["gla"])
    with pytest.raises(ps.DeviceError, match="explain: model must be on a device with data, got meta"):
        ps.explain(model)


def test_calls_outside_of_a_recording_are_not_collected():
    model = model_of("gla")
    with recorded(model) as found:
        pass
    model(torch.zeros(1, SIZES["num_layers"], dtype=torch.int64))
    assert found == []
