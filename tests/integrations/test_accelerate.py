"""accelerate: weights that hooks bring to a device for each module, and a model that is dispatched."""

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of
from formulas import error

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from penstock.models.huggingface import PenstockForCausalLM  # noqa: E402

IDS = torch.randint(SIZES["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(1))
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0, "eos_token_id": None}


def offloaded(model):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model):
    places = {"model.embeddings": "cpu", "model.embedding_norm": "cpu", "model.norm": "cpu", "head": "cpu", "model.layers.0": "cpu"}
    places = {name: place for name, place in places.items() if name != "model.embedding_norm" or model.model.embedding_norm is not None}
    return accelerate.dispatch_model(model, places | {"model.layers.1": "cpu"}, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("change", [offloaded, dispatched])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_of_accelerate_act_with_and_without_a_cache(name, change) -> None:
    plain, model = (PenstockForCausalLM.of(model_of(name).eval()) for _ in range(2))
    model = change(model)
    with torch.no_grad():
        wanted = plain(IDS).logits
        for cached in (False, True):
            assert error(model(IDS, use_cache=cached).logits, wanted) < 1e-5
    assert torch.equal(model.generate(IDS, **OPTIONS), plain.generate(IDS, **OPTIONS))
