"""torch.compile with inductor: a model's forward pass, loss and gradients, and a compiled layer in a model that generates."""

import pytest
import torch
from architectures import SIZES, model_of
from formulas import error

pytest.importorskip("transformers")

from penstock.models.huggingface import PenstockForCausalLM

IDS = torch.randint(SIZES["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(1))
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("at_full_speed"),
    pytest.mark.parametrize("name", ["rwkv6", "gla", "retnet", "mamba2"]),
]


@pytest.mark.slow
def test_a_compiled_model(name) -> None:
    plain, model = (PenstockForCausalLM.of(model_of(name).train()) for _ in range(2))
    compiled = torch.compile(model)
    found, wanted = compiled(IDS, labels=IDS), plain(IDS, labels=IDS)
    assert error(found.logits, wanted.logits) < 1e-5
    found.loss.backward()
    wanted.loss.backward()
    for (place, x), y in zip(model.named_parameters(), plain.parameters()):
        assert error(x.grad, y.grad) < 1e-4, place


@pytest.mark.slow
def test_compiled_layers_in_a_model_that_generates(name) -> None:
    plain, model = (PenstockForCausalLM.of(model_of(name).eval()) for _ in range(2))
    model.model.layers[0].compile(backend="aot_eager", dynamic=True)
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="aot_eager", dynamic=True)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        assert error(model(IDS).logits, plain(IDS).logits) < 1e-5
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
