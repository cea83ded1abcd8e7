"""Checkpoints as trainers write them: with parts of names and dicts around the weights, in every format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from public_models import Weights, read_all, rewritten, rwkv6, write_pth
from public_models.published import PUBLISHED

from penstock import InvalidArgument
from penstock.layers import SoftmaxAttentionConfig
from penstock.models import CausalLM, load, save
from penstock.models import hybrid as hybrid_config
from penstock.models import linear as linear_config

STEP = torch.tensor(3)


def before(prefix: str) -> Callable[[Weights], Weights]:
    return lambda w: {prefix + name: x for name, x in w.items()}


def inside(w: Weights, wrapper: str) -> Weights:
    """Layers that are wrapped one by one."""
    return {re.sub(r"((?:layers|blocks)\.\d+\.)", rf"\1{wrapper}.", name): x for name, x in w.items()}


FORMS: dict[str, Callable[[Weights], object]] = {
    "DistributedDataParallel": before("module."),
    "Fabric": before("_forward_module."),
    "compiled": before("_orig_mod."),
    "compiled layers": lambda w: inside(w, "_orig_mod"),
    "compiled and distributed": before("module._orig_mod."),
    "FSDP": lambda w: before("_fsdp_wrapped_module.")(inside(w, "_fsdp_wrapped_module")),
    "FSDP, checkpointed": lambda w: inside(w, "_fsdp_wrapped_module._checkpoint_wrapped_module"),
    "Lightning": lambda w: {"epoch": 3, "state_dict": before("model.")(w), "optimizer_states": [{"state": {}}], "loops": None},
    "Lightning and DeepSpeed": lambda w: {"module": before("_forward_module.model.")(w), "ds_version": "0.17", "global_steps": STEP},
    "a class around a class": before("model.model."),
    "PEFT, merged": before("model.base_model.model."),
    "a module of another name": before("net."),
    "state_dict": lambda w: {"model": w, "rng_state": torch.zeros(9, dtype=torch.uint8), "step": 3},
    "state_dict of a state_dict": lambda w: {"model_state_dict": {"module": before("module.")(w)}},
    "state_dict twice": lambda w: {"model": w, "state_dict": w},
    "settings beside": lambda w: {"state_dict": w, "model": {"name": "small", "sizes": {"layers": 2}}, "module": {}},
    "counters": lambda w: {**w, "step": STEP, "done": torch.tensor([True])},
    "counters beside": lambda w: {**before("model.")(w), "metric.count": STEP},
    "parameters": lambda w: {name: torch.nn.Parameter(x) for name, x in w.items()},
}


def native(folder: Path) -> Path:
    config = hybrid_config(linear_config(vocab_size=13, hidden_size=24, num_layers=2, intermediate_size=40), SoftmaxAttentionConfig(2), [1])
    torch.manual_seed(3)
    save(CausalLM(config), folder / "native")
    return folder / "native"


SOURCES: dict[str, Callable[[Path], Path]] = {"penstock": native} | {name: one.write for name, one in PUBLISHED.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SOURCES)
def test_what_trainers_put_around_weights_is_left_out(name: str, form: str, tmp_path: Path) -> None:
    path = SOURCES[name](tmp_path)
    model = load(path)
    again = load(rewritten(FORMS[form](read_all(path)), path, tmp_path / "again"))
    assert again.config == model.config
    ours = again.state_dict()
    assert all(torch.equal(x, ours[one]) for one, x in model.state_dict().items())


def test_a_head_beside_the_model_in_a_wrapper(tmp_path: Path) -> None:
    """As in a state_dict of transformers' class in DistributedDataParallel."""
    path = native(tmp_path)
    model = load(path)
    w = {f"module.{name if name.startswith('head.') else f'model.{name}'}": x for name, x in read_all(path).items()}
    ours = load(rewritten(w, path, tmp_path / "again")).state_dict()
    assert all(torch.equal(x, ours[one]) for one, x in model.state_dict().items())


def test_what_is_no_part_of_the_model_is_named(tmp_path: Path) -> None:
    w = rwkv6.draw()
    others = {
        "teacher.weight": (before("model.")(w) | {"teacher.weight": torch.zeros(2)}, "teacher.weight must be absent from BlinkDL's"),
        "mask": (
            w | {"mask": torch.zeros(9, dtype=torch.bool)},
            "mask must be a tensor of floating .* got torch.bool. Quantised .* Take it",
        ),
        "twice": (w | before("_orig_mod.")(w), "path must be a checkpoint with every tensor once, got 'emb.weight' again"),
        "twice with a prefix": (before("model.")(w) | {"emb.weight": w["emb.weight"]}, "got emb.weight and model.emb.weight"),
        "two models": (
            {"model": w, "state_dict": {name: 2 * x for name, x in w.items()}},
            "a checkpoint of one model, got .* with 2 dicts of weights. Save one of them alone",
        ),
        "two models inside": ({"module": {"model": w, "state_dict": before("a.")(w)}}, "a checkpoint of one model"),
        "half of it": (before("model.")(w) | {f"other.{n}": torch.zeros(1) for n in range(len(w))}, "a checkpoint of a known format, got"),
    }
    for content, message in others.values():
        with pytest.raises(InvalidArgument, match=message):
            load(write_pth(content, tmp_path))


def test_a_counter_is_no_weight(tmp_path: Path) -> None:
    """A weight of one element is still one of floating point numbers."""
    model = CausalLM(linear_config(vocab_size=1, hidden_size=1, num_layers=1, intermediate_size=1, num_heads=1))
    save(model, tmp_path / "one")
    w = read_all(tmp_path / "one")
    path = rewritten(w | {"head.weight": torch.tensor([[1]])}, tmp_path / "one", tmp_path / "other")
    with pytest.raises(InvalidArgument, match=r"head\.weight must be a tensor of floating point numbers, got torch\.int64"):
        load(path)
