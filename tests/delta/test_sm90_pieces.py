"""The Gluon kernels of the delta rule for Hopper in updates in place, emulated on the CPU: whole pieces of 64 tokens."""

from dataclasses import replace
from math import prod

import pytest
import torch
from cases import arithmetic, offsets
from deltas import Delta, named
from emulated import gluon
from hopper_deltas import A100, EMULATED, H200, SMALL, budget
from pools import check_untouched, pool_of

import penstock as ps
from penstock.delta.inputs import canonical, computed
from penstock.delta.operators import ADVANCE
from penstock.delta.triton import plan
from penstock.delta.triton.calls import InPlace
from penstock.delta.triton.forms import anchored_sm90, channels_float32_sm90, channels_sm90, scalar_float32_sm90, scalar_sm90, wide_sm90
from penstock.gpu.plan import Plan
from penstock.tokens.pieces import CHUNK

pytestmark = EMULATED
OF = Delta("gated_delta_rule", B=2, H=2, T=64, K=128, V=128, dtype=torch.bfloat16, others=torch.float32, state=False)
CASES = {"gated_delta_rule": OF, "delta_rule": replace(OF, variant="delta_rule"), "kda": replace(OF, variant="kda")}
CASES["rwkv7"] = replace(OF, variant="rwkv7", K=64, V=64, raw=True)
CASES["rwkv7 in float16"] = replace(CASES["rwkv7"], dtype=torch.float16)
CASES["rwkv7 in float32"] = replace(CASES["rwkv7"], dtype=torch.float32)
CASES["kda of 64"] = replace(OF, variant="kda", K=64, V=64)
CASES["kda in float16"] = replace(OF, variant="kda", dtype=torch.float16)
CASES["kda in float32"] = replace(OF, variant="kda", dtype=torch.float32)
CASES["kda of 64 in float32"] = replace(OF, variant="kda", K=64, V=64, dtype=torch.float32)
CASES["wide keys"] = replace(OF, K=256)
CASES["wide values"] = replace(OF, variant="delta_rule", V=192)
CASES["float16"] = replace(OF, dtype=torch.float16)
CASES["float16 of 64"] = replace(OF, variant="delta_rule", K=64, V=64, dtype=torch.float16)
CASES["float32"] = replace(OF, dtype=torch.float32)
CASES["float32 of 64"] = replace(OF, variant="delta_rule", K=64, V=64, dtype=torch.float32)
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UPDATES = [
    ("gated_delta_rule", None, None, FLOAT32, "contiguous", "mixture"),
    ("gated_delta_rule", None, (5, -1), BFLOAT16, "gaps", "logsigmoid"),
    ("gated_delta_rule", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "heads first", "mixture"),
    ("gated_delta_rule", (5, 1, 63), (3, 0, 5), FLOAT32, "contiguous", "mixture"),
    ("gated_delta_rule", (5, 64, 70), (-1, 4, 1), FLOAT16, "contiguous", "gone"),
    ("delta_rule", (130, 64, 3), (1, -4, 0), FLOAT64, "gaps", "weak"),
    ("kda", None, (5, -1), FLOAT32, "heads first", "mixture"),
    ("kda", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), BFLOAT16, "gaps", "mixture"),
    ("kda", (5, 1, 63), None, FLOAT32, "contiguous", "gone"),
    ("rwkv7", None, (5, -1), FLOAT32, "heads first", "raw"),
    ("rwkv7", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "contiguous", "raw"),
    ("rwkv7", (5, 64, 70), (-1, 4, 1), BFLOAT16, "gaps", "raw"),
    ("rwkv7", (5, 1, 63), None, FLOAT32, "contiguous", "raw"),
    ("rwkv7 in float16", None, (5, -1), FLOAT32, "heads first", "raw"),
    ("rwkv7 in float16", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "contiguous", "raw"),
    ("rwkv7 in float16", (5, 64, 70), (-1, 4, 1), FLOAT16, "gaps", "raw"),
    ("rwkv7 in float32", None, (5, -1), FLOAT32, "heads first", "raw"),
    ("rwkv7 in float32", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "contiguous", "raw"),
    ("rwkv7 in float32", (5, 64, 70), (-1, 4, 1), FLOAT32, "gaps", "raw"),
    ("kda of 64", None, (5, -1), FLOAT32, "heads first", "mixture"),
    ("kda of 64", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), BFLOAT16, "gaps", "mixture"),
    ("kda in float16", None, (5, -1), FLOAT32, "heads first", "mixture"),
    ("kda in float16", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT16, "gaps", "mixture"),
    ("kda in float16", (5, 1, 63), None, FLOAT32, "contiguous", "gone"),
    ("kda in float32", None, (5, -1), FLOAT32, "heads first", "mixture"),
    ("kda in float32", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "gaps", "mixture"),
    ("kda of 64 in float32", (5, 64, 70), (-1, 4, 1), FLOAT32, "contiguous", "gone"),
    ("wide keys", None, (5, -1), BFLOAT16, "gaps", "logsigmoid"),
    ("wide keys", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "heads first", "mixture"),
    ("wide keys", (5, 1, 63), None, FLOAT32, "contiguous", "gone"),
    ("wide values", (130, 64, 3), (1, -4, 0), FLOAT16, "gaps", "weak"),
    ("float16", None, (5, -1), FLOAT32, "contiguous", "mixture"),
    ("float16", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "heads first", "logsigmoid"),
    ("float16", (5, 64, 70), (-1, 4, 1), FLOAT16, "gaps", "gone"),
    ("float16 of 64", (130, 64, 3), (1, -4, 0), FLOAT64, "contiguous", "weak"),
    ("float32", None, (5, -1), FLOAT32, "contiguous", "mixture"),
    ("float32", (64, 0, 130, 5, 1, 200), (3, 0, 5, 1, -2, 2), FLOAT32, "heads first", "logsigmoid"),
    ("float32", (5, 64, 70), (-1, 4, 1), FLOAT32, "gaps", "gone"),
    ("float32 of 64", (130, 64, 3), (1, -4, 0), FLOAT64, "gaps", "weak"),
    ("float32", (5, 64, 130), (-1, 4, 1), BFLOAT16, "contiguous", "weak"),
    ("kda in float32", (130, 64, 3), (1, -4, 0), FLOAT16, "gaps", "weak"),
]
"""A name of ``CASES``, lengths of sequences, rows of the pool, its dtype and layout, and decays."""
FORMS = {
    "kda": channels_sm90.PIECES, "gated_delta_rule": scalar_sm90.PIECES, "delta_rule": scalar_sm90.PIECES, "rwkv7": anchored_sm90.PIECES,
    "kda of 64": channels_sm90.PIECES, "kda in float16": channels_sm90.PIECES,
    "kda in float32": channels_float32_sm90.PIECES, "kda of 64 in float32": channels_float32_sm90.PIECES, "wide keys": wide_sm90.PIECES,
    "rwkv7 in float16": anchored_sm90.PIECES, "rwkv7 in float32": anchored_sm90.PIECES, "wide values": wide_sm90.PIECES,
    "float16": scalar_sm90.PIECES, "float16 of 64": scalar_sm90.PIECES,
    "float32": scalar_float32_sm90.PIECES, "float32 of 64": scalar_float32_sm90.PIECES,
}  # fmt: skip


def checked(case, given):
    """The problem, with log decays."""
    function, tensors = f"advance({case.variant!r})", [given.get(name) for name in ADVANCE.names]
    problem = ADVANCE.checked(function, tensors, (None, *case.flags.values()))
    return canonical(problem, computed(problem, False)) if case.raw else problem


def problem_and_pool(name, lengths, slots, pool, layout, gate):
    case = replace(CASES[name], lengths=lengths, gate=gate)
    tensors, rows = case.tensors(), 6 if slots else case.sizes["N"]
    state, memory = pool_of(rows, case, pool, layout)
    given = tensors | {"cu_seqlens": offsets(case), "slots": None if slots is None else torch.tensor(slots), "state": state}
    return case, tensors, given, checked(case, given), memory


def run(form, given, problem, target=H200, seed=0):
    """The output of the launches for whole pieces."""
    made, call = Plan(), InPlace.of(problem, target)
    assert form.refusal(call) is None
    output = made.empty("output", *problem.v.shape, dtype=problem.v.dtype)
    form.plan(made, call, output, CHUNK)
    tensors = {name: problem.q if x is None else x for name, x in given.items()}
    tensors |= {name: x for name in ("q", "k", "g") if (x := getattr(problem, name)) is not None}
    return gluon.run(made, tensors, problem.sizes, seed)["output"]


@pytest.mark.parametrize(("name", "lengths", "slots", "pool", "layout", "gate"), UPDATES)
def test_pieces_are_updated_in_place(name, lengths, slots, pool, layout, gate):
    """Other rows of the pool and tokens after the pieces are not touched. A pool of 16 bits holds the state between two pieces."""
    case, tensors, given, problem, memory = problem_and_pool(name, lengths, slots, pool, layout, gate)
    state = given["state"]
    wanted, before, touched = state.double().clone(), memory.clone(), torch.zeros(len(state), dtype=torch.bool)
    output = run(FORMS[name], given, problem)
    allowed = arithmetic(case.dtype) if case.dtype == FLOAT32 else budget(case)
    if pool.itemsize < 4:  # numbers next to the middle between two of the pool
        allowed += torch.finfo(pool).eps / 16
    spans = [(n, 0, 64) for n in range(case.B)] if lengths is None else [(0, *span) for span in problem.spans()]
    for n, (row, begin, end) in enumerate(spans):
        slot, end = n if slots is None else slots[n], begin + (end - begin) // 64 * 64
        if slot < 0 or begin == end:
            continue
        touched[slot] = True
        for first in range(begin, end, 64):
            of = slice(first, first + 64)
            part = {name: x[row : row + 1, of].double() for name, x in tensors.items() if x is not None and x.dim() > 2}
            one = wanted[slot : slot + 1].clone()
            expected = ps.advance(case.variant, **named(case, part, "q", "g"), state=one, impl="reference")
            wanted[slot] = one[0].to(pool).double()
            assert (output[row, of].double() - expected[0]).norm() <= allowed * expected.norm()
    if touched.any():
        assert (state.double() - wanted)[touched].norm() <= allowed * wanted[touched].norm()
    check_untouched(state, memory, before, touched)


@pytest.mark.parametrize("name", FORMS)
def test_bits_depend_neither_on_cuts_nor_on_other_sequences(name):
    """One sequence of three pieces: alone, cut, and between others, whose programs have other value channels."""
    case = replace(CASES[name], B=1, T=192, gate="mixture")
    tensors, shape = case.tensors(), (4, 2, case.K, case.V)

    def advanced(parts, state, target):
        outputs = []
        for begin, end, beside in parts:
            pieces = [*[(0, 64)] * beside, (begin, end), *[(64, 128)] * beside]
            given = {key: torch.cat([x[:, a:b] for a, b in pieces], 1) for key, x in tensors.items() if x is not None}
            ends = torch.tensor([0, *(b - a for a, b in pieces)]).cumsum(0)
            rows = [*range(1, beside + 1), 0, *[-1] * beside]
            given |= {"cu_seqlens": ends, "slots": torch.tensor(rows), "state": state}
            first = beside * 64
            outputs.append(run(FORMS[name], given, checked(case, given), target, seed=beside)[:, first : first + end - begin])
        return torch.cat(outputs, 1), state[0]

    def pool():
        return torch.linspace(-1, 1, prod(shape)).view(shape).sin()

    whole, last = advanced([(0, 192, 0)], pool(), H200)
    for parts, target in (([(0, 64, 0), (64, 192, 0)], H200), ([(0, 128, 2), (128, 192, 1)], SMALL)):
        output, state = advanced(parts, pool(), target)
        assert torch.equal(output, whole)
        assert torch.equal(state, last)


@pytest.mark.parametrize("name", FORMS)
def test_a_pool_without_rows_is_not_read(name):
    """All slots are negative."""
    case, _, given, _, _ = problem_and_pool(name, (64, 70), (-1, -2), FLOAT32, "contiguous", "mixture")
    given["state"] = given["state"][:0].clone()  # without the memory of other slots
    run(FORMS[name], given, checked(case, given))


@pytest.mark.parametrize("name", FORMS)
def test_is_taken_on_hopper(name):
    """Those that have run on a GPU."""
    _, _, _, problem, _ = problem_and_pool(*next(one for one in UPDATES if one[0] == name))
    taken = "delta_pieces" if FORMS[name].avoids(InPlace.of(problem, H200)) else FORMS[name].name
    assert plan.advance_plan(problem, H200).forms[0] == taken
    assert plan.advance_plan(problem, A100).forms[0] == "delta_pieces"
