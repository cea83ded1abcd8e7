"""Adapters of RWKV-PEFT and PEFT, as changes of the weights W [out,in] of a base model.

Sources: github.com/JL-er/RWKV-PEFT, ``merge`` and ``rwkvt/peft/rwkvLinear.py``; github.com/huggingface/peft, ``tuners/lora`` and
``tuners/miss``; Kang and Yin 2024, arXiv 2409.15371.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import Complaints, RangeError, described, shortened
from .archive import Archive, read_json

Change = Callable[[Tensor], Tensor]
"""A function from the weight of the base model to that of the adapted one, in float32 or float64."""

PART = re.compile(r"(.+)\.((?:init_)?lora_[AB]|lora_embedding_[AB]|bone|disha|miss_block)(?:\.default)?(?:\.weight)?")
"""Names of the parts of an adapter: the map that it changes, and the kind of part. PEFT appends .weight."""
TABLE = "lora_embedding_"
"""The begin of parts that change a table of embeddings."""
PEFT = "adapter_config.json"
PLAIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "LORA": {
        "use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,), "alpha_pattern": (None, {}), "layer_replication": (None,),
        "init_lora_weights": (True, False, "gaussian"), "bias": ("none",), "target_parameters": (None,), "trainable_token_indices": (None,),
    },
    "MISS": {"init_weights": (True, False, "bat", "mini"), "bias": ("none",)},
}  # fmt: skip
"""The supported values in PEFT's adapter_config.json: the formulas below apply to them. Other values change the base model, too."""


@dataclass(frozen=True)
class Options:
    """Options of an adapter that its tensors do not determine."""

    alpha: float | None = None
    """LoRA's alpha."""
    initial: Mapping[str, Tensor] | None = None
    """The initial adapter, which PiSSA has subtracted from the base model."""
    root: bool = False
    """Whether LoRA divides alpha by the root of the rank."""
    by_outputs: bool | None = None
    """Whether blocks [n,r,r] belong to rows of blocks of W, not to columns."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """LoRA: W + scale B A, with A [r,in] and B [out,r]. PiSSA subtracts the product of the initial A and B."""

    A: Tensor
    B: Tensor
    scale: float
    initial: tuple[Tensor, Tensor] | None = None

    def __call__(self, W: Tensor) -> Tensor:
        """The weight of the adapted model."""
        W = W + self.scale * (self.B.to(W.dtype) @ self.A.to(W.dtype))
        return W if self.initial is None else W - self.initial[1].to(W.dtype) @ self.initial[0].to(W.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """``down`` [r,in] and ``up`` [out,r], float32: the weight becomes W + up down."""
        down, up = self.A.float(), self.B.float() * self.scale
        if self.initial is None:
            return down, up
        return torch.cat([down, self.initial[0].float()]), torch.cat([up, -self.initial[1].float()], 1)


@dataclass(frozen=True, eq=False)
class Changed:
    """The change of a weight by an adapter: a replacement, a change, or both in this order."""

    change: Change | None
    replaced: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """The weight of the adapted model, of the one of the base model."""
        x = x if self.replaced is None else self.replaced.reshape(x.shape)
        return x if self.change is None else self.change(x.to(torch.promote_types(x.dtype, torch.float32)))


def shards(W: Tensor, D: Tensor) -> Tensor:
    """MiSS, in RWKV-PEFT DiSHA "bone": every r columns of W get D [r,out], transposed; a narrower D is repeated."""
    out, inner = W.shape
    return W + D.to(W.dtype).T.repeat(out // D.shape[1], -(-inner // D.shape[0]))[:, :inner]


def blocks(W: Tensor, D: Tensor, by_outputs: bool) -> Tensor:
    """Bone: each block [r,r] of W becomes W + W D + D, with the D of its row (``by_outputs``) or column of blocks. D is [n,r,r]."""
    D, r = D.to(W.dtype), D.shape[-1]
    parts = W.unflatten(0, (-1, r)).unflatten(2, (-1, r))
    product = torch.einsum("aibj,ajk->aibk" if by_outputs else "aibj,bjk->aibk", parts, D)
    y: Tensor = (parts + product + (D[:, :, None] if by_outputs else D.transpose(0, 1))).reshape(W.shape)
    return y


def changes(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], options: Options) -> dict[str, Changed]:
    """The changes of weights NAME.weight by an adapter; ``shapes`` are those of the base model.

    Other tensors replace those of the base model. Raises RangeError, also for tensors that the model does not have.
    """
    complaints = Complaints("load")
    found: dict[str, Changed] = {}
    adapted: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, x in tensors.items():
        match = PART.fullmatch(name)
        target = f"{match[1]}.weight" if match else name
        if target not in shapes:
            complaints.add(RangeError, "adapter", "one for this base model", f"{name}, and no {target}")
        elif match:
            adapted.setdefault(target, {})[match[2]] = x
        elif [n for n in x.shape if n != 1] != [n for n in shapes[target] if n != 1]:
            rule = f"one for this base model, with {name} of shape {list(shapes[target])}"
            complaints.add(RangeError, "adapter", rule, list(x.shape))
        else:
            whole[name] = x
    complaints.raise_any()
    if options.by_outputs is None:
        options = Options(options.alpha, options.initial, options.root, _by_outputs(complaints, adapted, shapes))
    for target in {*adapted, *whole}:
        change = _change(complaints, target, adapted[target], shapes[target], options) if target in adapted else None
        found[target] = Changed(change, whole.get(target))
    complaints.raise_any()
    return found


def _change(
    complaints: Complaints, target: str, parts: Mapping[str, Tensor], shape: torch.Size, options: Options
) -> Change | None:  # fmt: skip
    """The change of one weight."""
    name, remedy = target.removesuffix(".weight"), f"{target} is of shape {list(shape)}."
    out, inner = shape if len(shape) == 2 else (0, 0)
    if set(parts) == {f"{TABLE}A", f"{TABLE}B"} and all(x.dim() == 2 for x in parts.values()):  # of W [V,C], A is [r,V] and B [C,r]
        parts = {"lora_A": parts[f"{TABLE}B"].T, "lora_B": parts[f"{TABLE}A"].T}
    if set(parts) == {"lora_A", "lora_B"}:
        A, B = parts["lora_A"], parts["lora_B"]
        r = A.shape[0] if A.dim() else 0
        if r and A.shape == (r, inner) and B.shape == (out, r):
            initial = None if options.initial is None else _initial(complaints, name, options.initial, A, B)
            scale = 1.0 if options.alpha is None else options.alpha / (r**0.5 if options.root else r)
            return LowRank(A, B, scale, initial)
        value = f"{list(A.shape)} and {list(B.shape)}"
        complaints.add(RangeError, "adapter", f"one with {name}.lora_A of shape [r,in] and .lora_B of shape [out,r]", value, remedy)
        return None
    (kind, D), *others = parts.items()
    r = D.shape[0] if D.dim() == 2 and D.numel() else 0
    if others or kind not in ("bone", "disha", "miss_block"):
        complaints.add(RangeError, "adapter", f"one with lora_A and lora_B of {name}, or with one other part of it", ", ".join(parts))
    elif r and (D.shape[1] == out if kind == "disha" else kind == "miss_block" and out % D.shape[1] == 0) and D.shape[0] <= inner:
        return partial(shards, D=D)
    elif r and kind == "bone" and D.shape[0] == out and out % (r := D.shape[1]) == 0 and inner % r == 0:
        return partial(blocks, D=D.reshape(-1, r, r), by_outputs=True)
    elif D.dim() == 3 and D.numel() and D.shape[1] == D.shape[2] and not (out % D.shape[1] or inner % D.shape[1]):
        if options.by_outputs is None:
            value = f"{name}.{kind} of shape {list(D.shape)} and square weights alone"
            rule = "one whose blocks belong to rows or to columns of a weight, which a weight that is not square tells"
            complaints.add(RangeError, "adapter", rule, value, "Merge it by the program that made it.")
        elif D.shape[0] * D.shape[1] == (out if options.by_outputs else inner):
            return partial(blocks, D=D, by_outputs=options.by_outputs)
        else:
            complaints.add(RangeError, "adapter", f"one whose {name}.{kind} fits the base model", list(D.shape), remedy)
    else:
        complaints.add(RangeError, "adapter", f"one whose {name}.{kind} fits the base model", list(D.shape), remedy)
    return None


def _initial(complaints: Complaints, name: str, initial: Mapping[str, Tensor], A: Tensor, B: Tensor) -> tuple[Tensor, Tensor] | None:
    found = [initial.get(f"{name}.init_lora_{one}") for one in "AB"]
    for one, x, like in zip("AB", found, (A, B)):
        if x is None or x.shape != like.shape:
            value = "none" if x is None else list(x.shape)
            complaints.add(RangeError, "adapter_init", f"a file with {name}.init_lora_{one} of shape {list(like.shape)}", value)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _by_outputs(
    complaints: Complaints, adapted: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, torch.Size]
) -> bool | None:  # fmt: skip
    """Whether blocks belong to rows of blocks of the weights; None if there are no blocks, or weights are square."""
    found = set()
    for target, parts in adapted.items():
        for D in parts.values():
            if D.dim() == 3 and len(shapes[target]) == 2 and len({*shapes[target], 0}) == 3:
                found |= {axis for axis, size in enumerate(shapes[target]) if size == D.shape[0] * D.shape[1]}
    if len(found) > 1:
        complaints.add(RangeError, "adapter", "one whose blocks all belong to rows of weights, or all to columns", "both")
        complaints.raise_any()
    return None if not found else found == {0}


def options_of(archive: Archive, alpha: float | None, initial: Mapping[str, Tensor] | None) -> Options:
    """The options of an adapter, from its adapter_config.json if it is PEFT's; ``initial`` are the tensors of PiSSA's file.

    Raises RangeError if one is missing or has no meaning.
    """
    complaints = Complaints("load")
    kinds = {match[2] for match in map(PART.fullmatch, archive.tensors) if match}
    given = {"adapter_alpha": alpha, "adapter_init": initial}
    beside = archive.path.is_dir() or archive.path.name.startswith("adapter_model.")
    stored = read_json(complaints, archive.folder / PEFT) if beside else {}
    if stored:
        options = _peft_options(complaints, stored)
        wrong = {name: f"Its {PEFT} has what is needed." for name, value in given.items() if value is not None}
    elif not kinds & {"lora_A", "lora_B"}:
        options = Options(alpha, initial)
        wrong = {name: "It belongs to LoRA and PiSSA." for name, value in given.items() if value is not None}
    elif alpha is None and initial is None:
        remedy = "Pass adapter_alpha, the lora_alpha of its training, or for PiSSA adapter_init, its init_pissa.pth."
        complaints.add(RangeError, "adapter_alpha", "given for a file of LoRA, which does not tell it", "None", remedy)
        options, wrong = Options(), {}
    else:
        options = Options(alpha, initial)
        wrong = {"adapter_alpha": "PiSSA has none."} if alpha is not None and initial is not None else {}
    for name, remedy in wrong.items():
        complaints.add(RangeError, name, "None for this adapter", described(given[name]) if name == "adapter_alpha" else "a file", remedy)
    complaints.raise_any()
    return options


def _peft_options(complaints: Complaints, stored: Mapping[str, Any]) -> Options:
    """The options in PEFT's adapter_config.json."""
    kind, remedy = str(stored.get("peft_type")), "Merge it by PEFT: PeftModel.merge_and_unload()."
    if kind not in PLAIN:
        complaints.add(RangeError, f"peft_type in {PEFT}", f"one of {', '.join(PLAIN)}", shortened(kind), remedy)
        complaints.raise_any()
    for name, wanted in PLAIN[kind].items():
        value = stored.get(name, wanted[0])
        if value not in wanted:
            complaints.add(RangeError, f"{name} in {PEFT}", " or ".join(map(repr, wanted)), described(value), remedy)
    alpha = stored.get("lora_alpha", 8) if kind == "LORA" else None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | None):
        complaints.add(RangeError, f"lora_alpha in {PEFT}", "a number", described(alpha))
    complaints.raise_any()
    return Options(alpha, root=bool(stored.get("use_rslora")), by_outputs=True)
