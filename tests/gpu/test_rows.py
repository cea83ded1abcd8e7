"""Every form for Hopper refuses calls whose matrices, copied in tiles, have more rows than 32-bit integers number. Nothing has memory."""

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from penstock.delta import operators as delta
from penstock.delta.triton import ahead as delta_ahead
from penstock.delta.triton.answers import CALLS as DELTA_CALLS
from penstock.delta.triton.forms import lists as delta_lists
from penstock.delta.variants import VARIANTS as DELTA
from penstock.gpu import forms, hopper
from penstock.gpu.plan import Plan
from penstock.gpu.target import Target
from penstock.recurrence import operators as recurrence
from penstock.recurrence.triton import calls as recurrence_calls
from penstock.recurrence.triton import tuning
from penstock.recurrence.triton.forms import lists as recurrence_lists
from penstock.recurrence.triton.forms import states
from penstock.softmax import operators as softmax
from penstock.softmax.triton import calls as softmax_calls
from penstock.softmax.triton import plan as softmax_plan
from penstock.tokens.pieces import CHUNK
from penstock.tokens.shape import Shape

pytestmark = pytest.mark.skipif(hopper.without_gluon() is not None, reason="this Triton has no Gluon for Hopper")
H200 = Target("sm_90", 132, 232448)
LIMIT = 2**31


class Case(NamedTuple):
    """A form, one of its examples, and whether sequences are packed."""

    family: str
    mode: str
    form: Any
    example: Any
    packed: bool

    def __str__(self) -> str:
        sizes = ",".join(f"{name}{size}" for name, size in self.example.sizes.items() if name in "KVD")
        dtype = str(self.example.dtype).removeprefix("torch.")
        return f"{self.form.name} {self.example.variant} {dtype} {sizes}{' packed' * self.packed}"


def listed(family, lists):
    """The cases of the forms for Hopper in lists by mode."""
    found = [(mode, form) for mode, among in lists for form in forms.every(among) if form.absent is hopper.absent]
    assert found
    return [Case(family, *one, example, packed) for one in found for example in one[1].examples for packed in (False, True)]


CASES = [
    *listed(
        "delta", [("forward", delta_lists.CHUNK_FORWARD), ("backward", delta_lists.CHUNK_BACKWARD), ("advance", delta_lists.PIECES)]
    ),
    *listed(
        "recurrence",
        [
            ("forward", recurrence_lists.CHUNK_FORWARD), ("backward", recurrence_lists.CHUNK_BACKWARD),
            ("advance", recurrence_lists.PIECES),
        ],
    ),
    *listed("softmax", [("forward", softmax_plan.FORWARD), ("backward", softmax_plan.BACKWARD)]),
]  # fmt: skip


def problem(case, B, T, N):
    """The problem of a case with these numbers of batches, tokens and, if it is packed, sequences."""
    sizes, dtype, variant = case.example.sizes, case.example.dtype, case.example.variant
    ends = torch.empty(N + 1, dtype=torch.int64, device="meta") if case.packed else None
    if case.family == "softmax":
        q, k = (torch.empty(B, T, sizes[heads], sizes["D"], dtype=dtype, device="meta") for heads in "HG")
        return softmax.ATTENTION.checked("softmax_attention", (q, k, k, ends, ends), (True, None, None, False))
    shape, groups = Shape(B, T, sizes["H"], sizes["K"], sizes["V"]), sizes.get("G", 0)
    if case.family == "delta":
        raw = "g" in (case.example.omitted or ())
        one = raw and DELTA[variant].streams == 1
        given, of, options = delta_ahead.without_memory(variant, shape, dtype, groups, raw), delta, (one, one, False, None)
        whole = delta.DELTA, (None, True, *options)
    else:
        given, of, options = tuning.without_memory(variant, shape, dtype, groups), recurrence, ()
        whole = recurrence.RECURRENCE, (None, False, True)
    given["cu_seqlens"] = ends
    if case.mode != "advance":
        operator, options = whole
        return operator.checked(variant, [given.get(name) for name in operator.names], options)
    given["state"] = torch.empty(N if case.packed else B, *shape.state[1:], device="meta")
    return of.ADVANCE.checked(f"advance({variant!r})", [given.get(name) for name in of.ADVANCE.names], (None, *options))


def call_of(case, B, T, N):
    p = problem(case, B, T, N)
    d_output = torch.empty_like(p.q if case.family == "softmax" else p.v)
    if case.family == "softmax":
        return softmax_calls.Call(p, H200, d_output if case.mode == "backward" else None)
    if case.family == "delta":
        more = {"d_output": d_output} if case.mode == "backward" else {"keep": True} if case.mode == "forward" else {}
        p = p if p.variant.streams == 1 and not p.variant.decay.endswith("K") else p.whole
        return DELTA_CALLS[case.mode].of(p, H200, **more)
    p = p.whole
    if case.mode == "advance":
        return recurrence_calls.InPlace.of(p, H200)
    if case.mode == "backward":
        return recurrence_calls.Backward.of(p, H200, d_output=d_output)
    return recurrence_calls.Forward.of(p, H200, keep=True, backward_chunk=CHUNK)


def tallest(case, call):
    """The most rows of a matrix that the form's plan copies in tiles."""
    p = call.p
    if case.form is states.HOPPER:  # a part of other forms, whose tiles are of tokens
        return p.sizes["B"] * p.sizes["T"]
    given = {name: x for name in p.operator.names if (x := getattr(p, name)) is not None}
    if case.mode == "advance":
        made = Plan()
        case.form.plan(made, call, made.empty("output", *p.v.shape, dtype=p.v.dtype), CHUNK)
    else:
        made = case.form.plan(call)
    given |= {name: p.q if case.family == "softmax" else p.v for name in ("d_output", "output") if name not in made.memory}
    made = made.at(p.sizes)
    shapes = {name: tuple(x.shape) for name, x in given.items()} | {name: shape for name, (shape, _) in made.memory.items()}
    rows = []
    for launch in made.launches:
        for name, tile in zip(launch.tensors, launch.tiles):
            rows.append(torch.Size(shapes[name][: tile.axes]).numel())
    return max(rows)


GROWN = {
    "tokens": lambda size, case: (1 if case.packed else 2, size, 2),
    "sequences": lambda size, case: (1, size, size // 8) if case.packed else (size, 128, 0),
}
"""Numbers of batches, tokens and sequences, by what grows."""


@pytest.mark.parametrize("grown", GROWN)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_beyond_32_bits_are_refused(case, grown):
    """The largest call that a form takes has fewer rows. They are few only where a call of its sizes may have more in another pass."""
    most = 0
    for power in range(8, 34):
        call = call_of(case, *GROWN[grown](2**power, case))
        why = case.form.refusal(call)
        if why is not None:
            break
        most = tallest(case, call)
    assert "2**3" in (why or "")
    assert LIMIT // 64 <= most < LIMIT
