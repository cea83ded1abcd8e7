"""FSDP2 on two processes: gradients, losses, cached logits and generation are those of one process."""

import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, randomised
from formulas import error
from ranks import spawned

from penstock.layers import RWKV6Config
from penstock.models import CausalLM

pytest.importorskip("transformers")

TUNED = replace(ARCHITECTURES["rwkv6"], mixer=RWKV6Config(head_size=8, mix_rank=3, decay_rank=5, tuned_state=True))
MODELS = {name: ARCHITECTURES[name] for name in ("rwkv5.2", "rwkv6", "rwkv7", "rwkv7a", "gla", "retnet", "linear", "mamba2", "hybrid")} | {
    "tuned state": TUNED
}


def shards(rank: int, place: str) -> None:
    found = []
    for name, config in MODELS.items():
        for check in (trained_and_generated, in_bfloat16, methods_of_a_plain_model):
            try:
                check(config, rank)
            except Exception:
                found.append(f"{name}, {check.__name__}:\n{traceback.format_exc()}")
                break  # the processes may not be in step any more
        if found:
            break
    Path(place, f"{rank}.txt").write_text("\n".join(found))


def model_of(config):
    torch.manual_seed(0)
    model = CausalLM(config)
    randomised(model)
    return model


IDS = torch.randint(SIZES["vocab_size"], (2, 6), generator=torch.Generator().manual_seed(7))
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(IDS)}


def sharded(model, layers, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained_and_generated(config, rank):
    from penstock.models.huggingface import PenstockForCausalLM

    for checkpointing in (False, True):
        plain, model = (PenstockForCausalLM.of(model_of(config)).train() for _ in range(2))
        if checkpointing:
            model.gradient_checkpointing_enable()
        sharded(model, model.model.layers)
        mine = IDS[rank : rank + 1]
        model(mine, labels=mine).loss.backward()
        plain(IDS, labels=IDS).loss.backward()
        for (name, x), y in zip(model.named_parameters(), plain.named_parameters()):
            assert error(x.grad.full_tensor(), y[1].grad) < 1e-4, name
    model.eval()
    plain.eval()
    with torch.no_grad():
        wanted = plain(IDS, use_cache=False).logits
        assert error(model(IDS, use_cache=False).logits, wanted) < 1e-5
        assert error(model(IDS).logits, wanted) < 1e-5
        assert torch.equal(model.generate(IDS, **OPTIONS), plain.generate(IDS, **OPTIONS))


def in_bfloat16(config, rank):
    """Mixed precision: parameters and inputs of layers are rounded, so are states between calls."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from penstock.models.huggingface import CACHE, PenstockForCausalLM

    model = PenstockForCausalLM.of(model_of(config)).train()
    sharded(model, model.model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    plain = PenstockForCausalLM.of(model_of(config)).eval()
    assert abs(float(loss.detach()) - float(plain(IDS, labels=IDS).loss.detach())) < 0.05
    assert all(x.grad.dtype == torch.float32 for x in model.parameters())
    model.eval()
    with torch.no_grad():
        whole, pieces, cache = model(IDS, use_cache=False).logits, [], None
        for piece in IDS.split([3, 1, 2], 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out[CACHE]
            pieces.append(out.logits)
        assert whole.dtype == torch.bfloat16
        assert error(torch.cat(pieces, 1), whole) < 0.1
        assert error(whole, plain(IDS).logits) < 0.1


def methods_of_a_plain_model(config, rank):
    from torch.distributed.fsdp import register_fsdp_forward_method

    plain, model = model_of(config), model_of(config)
    sharded(model, model.layers)
    for name in ("loss", "advance", "generate"):
        register_fsdp_forward_method(model, name)
    assert error(model(IDS).logits, plain(IDS).logits) < 1e-5
    assert torch.equal(model.generate(IDS, 4, temperature=0), plain.generate(IDS, 4, temperature=0))
    model.loss(IDS, IDS).backward()
    plain.loss(IDS, IDS).backward()
    assert error(model.head.weight.grad.full_tensor(), plain.head.weight.grad) < 1e-5


@pytest.mark.slow
def test_two_processes_are_one() -> None:
    with tempfile.TemporaryDirectory() as place:
        spawned(shards, 2, place)
        for rank in range(2):
            assert Path(place, f"{rank}.txt").read_text() == ""
