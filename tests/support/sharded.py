"""Models whose parameters are sharded over the ranks of a process group, beside the same models on one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from architectures import SIZES, model_of
from torch import Tensor

import penstock as ps
from penstock.models import CausalLM, save
from penstock.models.tokenizers import Bytes
from penstock.training.lm_eval import Answers
from penstock.training.scoring import score


def tokens(rank: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(rank))


def all_tokens() -> Tensor:
    return torch.cat([tokens(rank) for rank in range(dist.get_world_size())])


def same_gradients(model: CausalLM, plain: CausalLM) -> None:
    found = dict(model.named_parameters())
    for name, y in plain.named_parameters():
        x = found[name]
        assert (x.grad is None) == (y.grad is None), name
        if y.grad is not None:
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-3, atol=1e-5, msg=lambda text: f"{name}\n{text}")  # noqa: B023


def trained(rank: int, name: str, **options: object) -> None:
    """Gradients are those of one process with the tokens of all ranks; frozen parameters have none."""
    for checkpointing in (False, True, "selective"):
        plain, model = model_of(name), model_of(name)
        for one in (plain, model):
            one.gradient_checkpointing = checkpointing
            one.layers[0].mixer_norm.weight.requires_grad_(False)
        assert ps.distributed.shard(model, **options) is model
        ids, every = tokens(rank), all_tokens()
        losses = model.loss(ids[:, :-1], ids[:, 1:]), plain.loss(every[:, :-1], every[:, 1:])
        for loss in losses:
            loss.backward()
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), losses[1].detach())
        same_gradients(model, plain)


def evaluated(rank: int, name: str) -> None:
    """Generation, updates in place and scores are those of one process, and so are the forms of chains."""
    plain, model = model_of(name).eval(), ps.distributed.shard(model_of(name).eval())
    ids = all_tokens()
    assert torch.equal(model.generate(ids, 4, temperature=0), plain.generate(ids, 4, temperature=0))
    pools = [one.initial_state(len(ids), max_length=8) for one in (model, plain)]
    for begin, end in ((0, 6), (6, 7)):
        found, wanted = (one.advance(ids[:, begin:end], pool) for one, pool in zip((model, plain), pools))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(score(model, ids.tolist()), score(plain, ids.tolist())):
        torch.testing.assert_close(one.log_p, other.log_p, rtol=1e-4, atol=1e-5)
    answers = [Answers(one, Bytes()) for one in (model, plain)]
    asked = [SimpleNamespace(args=("\x03\x01", {"max_gen_toks": 3}))]
    assert answers[0].generate_until(asked) == answers[1].generate_until(asked)
    with pytest.raises(ps.DeviceError, match=r"save: model must be one with whole weights, got weights sharded .* Gather them by"):
        save(model, "nowhere")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    for mode in ("training", "prompt", "decode"):
        assert ps.explain(model, tokens=3, mode=mode).choices == ps.explain(plain, tokens=3, mode=mode).choices, mode
    model.layers[0].register_forward_hook(lambda *_: None)
    found = [one for one in ps.explain(model, mode="decode").choices if getattr(one, "chain", "") == "update_layer"]
    assert [one.form for one in found] == ["module"] + ["parts"] * (len(found) - 1)


def in_bfloat16(rank: int, name: str) -> None:
    """Layers compute with rounded parameters; gradients are float32."""
    plain, model = model_of(name), ps.distributed.shard(model_of(name), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    model.layers[0].mixer.register_forward_hook(lambda module, *_: seen.extend(one.dtype for one in module.parameters()))
    ids = tokens(rank)
    loss = model.loss(ids, ids)
    loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert all(x.grad.dtype == x.dtype == torch.float32 for x in model.parameters())
    torch.testing.assert_close(loss.detach(), plain.loss(ids, ids).detach(), rtol=0.05, atol=0.05, check_dtype=False)


def by_torch_alone(rank: int, name: str) -> None:
    """Methods that ``fully_shard`` does not know name the remedy; with it they work."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model, ids = model_of(name), tokens(rank)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    calls = {"loss": (ids, ids), "hidden": (ids,), "generate": (ids, 1), "advance": (ids, model.initial_state(len(ids), max_length=7))}
    for method, given in calls.items():
        with pytest.raises(
            ps.DeviceError, match=rf"{method}: model must be one whose parameters are gathered .*forward_method\(model, '{method}'\)"
        ):
            getattr(model, method)(*given)
    for method in calls:
        register_fsdp_forward_method(model, method)
    for method, given in calls.items():
        getattr(model, method)(*given)


def wrapped(rank: int, name: str) -> None:
    """The classes for transformers, of which only vectors are trained."""
    from penstock.models.huggingface import PenstockForCausalLM

    plain, model = (PenstockForCausalLM.of(model_of(name)) for _ in range(2))
    for one in (plain, model):
        for parameter in one.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    ps.distributed.shard(model)
    ids, every = tokens(rank), all_tokens()
    for one, given in ((model, ids), (plain, every)):
        one(given, labels=given).loss.backward()
    same_gradients(model, plain)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(every)}
    assert torch.equal(model.eval().generate(every, **options), plain.eval().generate(every, **options))


def over_two_axes(rank: int, name: str) -> None:
    """Replicas of sharded models."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    trained(rank, name, mesh=mesh)


def run(rank: int, checks: list, names: list[str]) -> None:
    for name in names:
        for check in checks:
            try:
                check(rank, name)
            except Exception as error:
                raise AssertionError(f"{check.__name__}, {name}, rank {rank}: {error}") from error
