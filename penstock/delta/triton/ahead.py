"""The calls whose kernels are compiled ahead of time: every kind of launch of the models on every supported GPU, by every form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.implementation import Mode
from ...gpu.forms import Form
from ...gpu.plan import Plan, Planned
from ...gpu.target import Target
from ...gpu.targets import SMALL
from ...tokens.dtypes import state_dtype
from ...tokens.pieces import CHUNK
from ...tokens.shape import Shape
from ..declaration import DeltaTokens
from ..inputs import canonical, is_raw, of_every_head, uncomputed
from ..operators import ADVANCE, DELTA
from ..variants import VARIANTS
from .answers import CALLS, READS_RAW
from .calls import Backward
from .forms import raw
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD, PIECES, TOKEN_FORWARD, TOKENS_IN_PLACE, residuals_of

KEEPING = "forward with residuals"
"""The forward pass of a call that wants gradients, by the forms that keep residuals."""
PASSES: Mapping[str, tuple[Mode, tuple[Form[Any, Any], ...], int]] = {
    "forward": ("forward", CHUNK_FORWARD, 0),
    KEEPING: ("forward", CHUNK_FORWARD, 0),
    "backward": ("backward", CHUNK_BACKWARD, 0),
    "pieces": ("advance", PIECES, 0),
    "step": ("advance", TOKENS_IN_PLACE, 1),
    "short forward": ("forward", TOKEN_FORWARD, 8),
}
"""Each pass: its mode, its forms and the number of tokens, if not that of the shape."""
WHOLE = ("forward", KEEPING, "backward")
CANONICAL = (*WHOLE, "pieces")
"""Passes before which raw inputs are computed."""
RAW = ("step", "raw", "raw backward")
"""Passes of calls with raw inputs: a decode step, and the stage before chunk kernels."""


@dataclass(frozen=True)
class Configuration:
    """A call of the delta rule."""

    variant: str
    shape: Shape
    dtype: str = "bfloat16"
    passes: tuple[str, ...] = tuple(PASSES)
    """Names of ``PASSES``, or of ``RAW``."""
    packed: bool = False
    groups: int = 0
    """Heads of q and k, if not H."""
    raw: bool = False
    """Whether all inputs are raw that may be."""

    @property
    def name(self) -> str:
        """The name in tables and in the record."""
        return (
            f"{self.variant} {self.shape.text} {self.dtype}"
            + " packed" * self.packed
            + f" G={self.groups}" * (self.groups > 0)
            + " raw" * self.raw
        )

    def planned(self, target: Target) -> Iterator[tuple[str, Planned]]:
        """Yield each pass and form with its plan on a GPU.

        A form that has no code for the GPU or refuses the call is left out; of ``KEEPING`` also one that keeps nothing.
        """
        for which in self.passes:
            if which.startswith("raw"):
                yield which, self._stage(which)
                continue
            mode, forms, _ = PASSES[which]
            p = self.computed(which)
            more: dict[str, Any] = {"keep": True} if which == KEEPING else {"d_output": torch.empty_like(p.v)} if mode == "backward" else {}
            for form in forms:
                call = CALLS[mode].of(self.computed(which, form) if form in READS_RAW else p, target, **more)
                if form.refusal(call) is None:
                    made = self._plan(form, call)
                    if which != KEEPING or residuals_of(call.p)[-1] in made.plan.memory:
                        yield f"{which}: {form.name}", made

    def computed(self, which: str, form: Form[Any, Any] | None = None) -> DeltaTokens:
        """The problem that a pass computes, without memory. ``form``: that computes it, which may read raw gates."""
        p = self._problem(which)
        staged = which in CANONICAL and is_raw(p) and form not in READS_RAW
        return of_every_head(canonical(p, uncomputed(p, False)) if staged else p)

    def _plan(self, form: Form[Any, Any], call: Any) -> Planned:
        """The plan of a form with initial states of 0. Updates in place have a pool of states without slots."""
        p = call.p
        given: dict[str, Tensor | None] = {name: getattr(p, name) for name in DELTA.names if name != "initial_state"}
        if isinstance(call, CALLS["advance"]):
            made = Plan()
            form.plan(made, call, made.empty("output", *p.v.shape, dtype=p.v.dtype), CHUNK)
            given |= {"state": p.state, "slots": None}
        else:
            made = form.plan(call)
            given |= {"initial_state": None, "d_final_state": None}
            given |= {"d_output": call.d_output} if isinstance(call, Backward) else {}
        return Planned(made.at(p.sizes), {name: p.q if tensor is None else tensor for name, tensor in given.items()})

    def _stage(self, which: str) -> Planned:
        """The plan of the stage of raw inputs."""
        p = self._problem("forward")
        made, given = raw.forward_plan(p), {name: getattr(p, name) for name in raw.INPUTS}
        if which == "raw backward":
            like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in made.at(p.sizes).memory.items()}
            upstream = {f"d_{name}": like.get(name) for name in raw.MADE.values()}
            made, given = raw.backward_plan(p, upstream), given | upstream
        return Planned(made.at(p.sizes), {name: p.q if tensor is None else tensor for name, tensor in given.items()})

    def _problem(self, which: str) -> DeltaTokens:
        """The problem of a pass, without memory."""
        mode, _, tokens = PASSES[which]
        shape = self.shape._replace(T=tokens or self.shape.T)
        given = without_memory(self.variant, shape, getattr(torch, self.dtype), self.groups, self.raw)
        one = self.raw and VARIANTS[self.variant].streams == 1
        options = (one, one, False, None)
        if self.packed and which != "step":
            given["cu_seqlens"] = torch.empty(5, dtype=torch.int64, device="meta")
        if mode != "advance":
            return DELTA.checked(self.variant, [given.get(name) for name in DELTA.names], (None, True, *options))
        given["state"] = torch.empty(4 if "cu_seqlens" in given else shape.B, *shape.state[1:], device="meta")
        return ADVANCE.checked(f"advance({self.variant!r})", [given.get(name) for name in ADVANCE.names], (None, *options))


def without_memory(variant: str, shape: Shape, dtype: torch.dtype, groups: int = 0, raw: bool = False) -> dict[str, Tensor]:
    """Inputs of a variant by name, without memory; q and k of ``groups`` heads if that is not 0."""
    size, row = shape._asdict() | {"G": groups or shape.H}, VARIANTS[variant]
    kind = dtype if raw else state_dtype(dtype)
    axes = {"q": ("BTGK", dtype), "k": ("BTGK", dtype), "v": ("BTHV", dtype)}
    axes |= {"raw" if raw else "g": (row.decay, kind)} if row.decay else {}
    axes |= {"A_log": ("H", torch.float32), "dt_bias": (row.bias, torch.float32)} if raw and row.bias else {}
    axes |= {"beta": ("BTH", kind)} if row.streams == 1 else {"a": ("BTHK", dtype), "b": ("BTHK", dtype)}
    return {name: torch.empty([size[axis] for axis in of], dtype=kind, device="meta") for name, (of, kind) in axes.items()}


PROMPT = (1, 1024)
"""B and T. The kernels of longer and of more sequences are the same."""

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("delta_rule", Shape(*PROMPT, 16, 128, 128)),
    Configuration("gated_delta_rule", Shape(*PROMPT, 32, 128, 128), groups=16),
    Configuration("gated_delta_rule", Shape(*PROMPT, 32, 128, 128), groups=16, passes=RAW, raw=True),
    Configuration("gated_delta_rule", Shape(*PROMPT, 32, 128, 128), passes=("backward",)),
    Configuration("gated_delta_rule", Shape(*PROMPT, 32, 128, 128), "float16", passes=CANONICAL),
    Configuration("gated_delta_rule", Shape(*PROMPT, 32, 128, 128), "float32", passes=CANONICAL),
    Configuration("delta_rule", Shape(*PROMPT, 32, 64, 64), "float32", passes=WHOLE),
    Configuration("gated_delta_rule", Shape(*PROMPT, 6, 256, 512)),
    Configuration("gated_delta_rule", Shape(*PROMPT, 6, 256, 512), passes=RAW, raw=True),
    Configuration("gated_delta_rule", Shape(*PROMPT, 8, 128, 256), passes=WHOLE),
    Configuration("kda", Shape(*PROMPT, 32, 128, 128)),
    Configuration("kda", Shape(*PROMPT, 32, 128, 128), passes=RAW, raw=True),
    Configuration("kda", Shape(*PROMPT, 32, 128, 128), packed=True, passes=WHOLE),
    Configuration("kda", Shape(*PROMPT, 32, 128, 128), "float32", passes=CANONICAL),
    Configuration("kda", Shape(*PROMPT, 32, 128, 128), "float16", passes=(*WHOLE, "pieces")),
    Configuration("kda", Shape(*PROMPT, 16, 100, 100), passes=WHOLE),
    Configuration("kda", Shape(*PROMPT, 32, 64, 64)),
    Configuration("kda", Shape(*PROMPT, 8, 256, 256), passes=WHOLE),
    Configuration("rwkv7", Shape(*PROMPT, 32, 64, 64)),
    Configuration("rwkv7", Shape(*PROMPT, 32, 64, 64), passes=(*RAW, *CANONICAL), raw=True),
    Configuration("rwkv7", Shape(*PROMPT, 32, 64, 64), "float16", passes=("forward", "backward", "pieces"), raw=True),
    Configuration("rwkv7", Shape(*PROMPT, 32, 64, 64), "float32", passes=("forward", "backward", "pieces"), raw=True),
    Configuration("rwkv7", Shape(*PROMPT, 32, 64, 64), "float32", passes=WHOLE),
    Configuration("dplr", Shape(*PROMPT, 32, 64, 64), passes=WHOLE),
)
IN_PART = (
    "gated_delta_rule 1,1024,32,128 bfloat16 G=16", "gated_delta_rule 1,1024,6,256,512 bfloat16", "kda 1,1024,32,128 bfloat16",
    "kda 1,1024,32,128 bfloat16 raw", "rwkv7 1,1024,32,64 bfloat16", "rwkv7 1,1024,32,64 bfloat16 raw",
)  # fmt: skip
"""The names of those for ``SMALL`` GPUs."""


def configurations(arch: str) -> tuple[Configuration, ...]:
    """The calls that are compiled for an architecture."""
    return tuple(one for one in CONFIGURATIONS if one.name in IN_PART) if arch in SMALL else CONFIGURATIONS
