"""Arguments of transformers' classes: embeddings, hidden states, hooks, caches, batches without tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of
from formulas import error
from sampling import slow
from torch import Tensor

from penstock import RangeError, ShapeError
from penstock.models import CausalLM

transformers = pytest.importorskip("transformers")
from wrapped_models import drawn, wrapped  # noqa: E402

from penstock.models.huggingface import PenstockForCausalLM, PenstockModel  # noqa: E402

pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]
GROWING = [name for name, config in ARCHITECTURES.items() if any(mixer.grows for mixer in config.mixers)]


@pytest.mark.parametrize("name", [*GROWING, "rwkv6", *slow(*(name for name in ARCHITECTURES if name not in (*GROWING, "rwkv6")))])
def test_cached_tokens_are_those_without_a_cache(name: str) -> None:
    """Greedy, padded on the left, and with beams, whose rows of states are exchanged."""
    model, ids = wrapped(name), drawn(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    for options in ({}, {"attention_mask": mask}, {"num_beams": 3}, {"num_beams": 2, "attention_mask": mask}):
        found, wanted = (model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cached, **options) for cached in (True, False))
        assert torch.equal(found, wanted)


def test_layers_that_read_tokens_take_no_embeddings_in_their_place() -> None:
    model, ids = wrapped("rwkv7a"), drawn(2, 7)
    message = (
        r"inputs_embeds must be None for a model whose layers read tokens, such as DeepEmbed, got .*\. Pass the tokens .* as input_ids"
    )
    embeds = model.get_input_embeddings()(ids)
    for call in (model, model.model, partial(model, use_cache=False), partial(model.generate, max_new_tokens=2)):
        with pytest.raises(RangeError, match=message):
            call(inputs_embeds=embeds)
    with pytest.raises(RangeError, match=rf"generate: {message}"):
        model.generate(inputs_embeds=embeds, max_new_tokens=2)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("rwkv7a", "rwkv7b")])
def test_embeddings_in_place_of_tokens(name: str) -> None:
    model, ids = wrapped(name), drawn(2, 7)
    keep = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    embeds = model.get_input_embeddings()(ids)
    for options in ({}, {"attention_mask": keep}, {"use_cache": True}, {"labels": ids}):
        with torch.set_grad_enabled("labels" in options):
            found, wanted = model(inputs_embeds=embeds, **options), model(ids, **options)
        assert torch.equal(found.logits, wanted.logits)
        assert "labels" not in options or torch.equal(found.loss, wanted.loss)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": keep, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, **options)[:, 7:]
    for cached in (True, False):
        assert torch.equal(model.generate(inputs_embeds=embeds, **options, use_cache=cached), wanted)
    with pytest.raises(ShapeError, match=r"inputs_embeds must be a tensor of shape \[B,T,C\], got \[2, 7\]"):
        model(inputs_embeds=ids)
    with pytest.raises(ShapeError, match="inputs_embeds"):
        model(inputs_embeds=embeds[..., 1:])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states(name: str) -> None:
    """The embeddings, what each layer but the last returns, and the last hidden states: as transformers has them."""
    model, ids = wrapped(name), drawn(2, 7)
    keep = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    wanted: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, given: wanted.append(given[0]))
    model.model.norm.register_forward_hook(lambda module, given, output: wanted.append(output))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    seen = list(wanted)
    for grad in (False, True):
        for cached in (False, True):
            with torch.set_grad_enabled(grad):
                out = model(ids, output_hidden_states=True, use_cache=cached)
                assert error(out.logits, plain) < 1e-9
                assert len(out.hidden_states) == SIZES["num_layers"] + 1
                assert all(error(x, y) < 1e-9 for x, y in zip(out.hidden_states, seen))
                padded = model(ids, attention_mask=keep, output_hidden_states=True, use_cache=cached).hidden_states
                alone = model(ids[1:, 2:], output_hidden_states=True).hidden_states
                assert all(error(x[1, 2:], y[0]) < 1e-9 for x, y in zip(padded, alone))
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == SIZES["num_layers"] + 1
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True)
    assert [len(step) for step in generated.hidden_states] == [SIZES["num_layers"] + 1] * 3
    model.config.output_hidden_states = False
    assert model(ids).hidden_states is None
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_act_the_same_with_and_without_a_cache(name: str) -> None:
    """A vector added to what a module returns: every module that can be named, in forward passes, padded ones and generate."""
    model, ids = wrapped(name), drawn(2, 6)
    keep = torch.tensor([[1] * 6, [0, 1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": keep, "pad_token_id": 0, "eos_token_id": None}

    def move(module: torch.nn.Module, given: Any, output: Any) -> Any:
        key = (
            None
            if isinstance(output, Tensor)
            else 0
            if isinstance(output, tuple)
            else "logits"
            if "logits" in output
            else "last_hidden_state"
        )
        first = output if key is None else output[key]
        first = first * 0.5 + torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)
        if isinstance(key, str):
            return type(output)(**{**output, key: first})
        return first if key is None else (first, *output[1:])

    plain = model(ids, attention_mask=keep).logits
    for place in ("", "model", "model.embeddings", "model.layers.0", "model.layers.1.mixer", "model.norm", "head"):
        calls: list[int] = []
        module = model.get_submodule(place)
        handle = module.register_forward_hook(lambda *given, calls=calls: calls.append(1) or move(*given))
        with torch.no_grad():
            whole = model(ids, attention_mask=keep, use_cache=False).logits
            assert error(model(ids, attention_mask=keep, use_cache=True).logits, whole) < 1e-9, place
            calls.clear()
            found = model.generate(ids, **options)
            assert len(calls) == 3, place
            assert torch.equal(found, model.generate(ids, **options, use_cache=False)), place
        trained = model(ids, attention_mask=keep, labels=ids).logits
        handle.remove()
        assert error(trained, whole) < 1e-9, place
        assert error(whole, plain) > 1e-6, place


@pytest.mark.parametrize("rescale_every", [0, 1])
def test_hidden_states_of_float16_models_are_not_halved(rescale_every: int) -> None:
    """The residual stream is halved inside of such models."""
    model = model_of("rwkv6")
    config = replace(model.config, rescale_every=rescale_every)
    half = CausalLM(config)
    half.load_state_dict(model.state_dict())
    wrapped, wanted, ids = PenstockForCausalLM.of(half.half().eval()), PenstockForCausalLM.of(model.eval()), drawn(2, 7)
    for cached in (False, True):
        with torch.no_grad():
            found = wrapped(ids, output_hidden_states=True, use_cache=cached).hidden_states
            assert all(error(x, y) < 5e-3 for x, y in zip(found, wanted(ids, output_hidden_states=True, use_cache=cached).hidden_states))


def test_wrapped_embeddings() -> None:
    """A module in the place of the embeddings needs no ``weight`` of its own."""
    model, ids = model_of("gla"), drawn(2, 5)
    wanted = model(ids).logits
    model.embeddings = torch.nn.Sequential(model.embeddings)
    for cached in (False, True):
        assert torch.equal(PenstockForCausalLM.of(model)(ids, use_cache=cached).logits, wanted)
    assert PenstockModel.of(model).config.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_without_tokens(name: str, shape: tuple[int, int]) -> None:
    model, ids = PenstockForCausalLM.of(model_of(name)), torch.zeros(shape, dtype=torch.int64)
    for cached in (False, True):
        for mask in (None, torch.ones_like(ids)):
            output = model(ids, attention_mask=mask, labels=ids, use_cache=cached, output_hidden_states=True)
            assert output.logits.shape == (*shape, SIZES["vocab_size"])
            assert {x.shape for x in output.hidden_states} == {(*shape, SIZES["hidden_size"])}
            assert output.loss.isnan()
