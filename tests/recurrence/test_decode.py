"""decode_step of every implementation equals the functions over sequences, in place in the given rows."""

import re

import pytest
import torch
from cases import NAMES, SHARED, Case, Wanted, call, check_against, draw
from pools import exact, pool_of

import penstock as ps
from penstock.recurrence.operators import ADVANCE, FAMILY
from penstock.recurrence.variants import VARIANTS

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SLOTS = [6, -1, 0, 3, -2]
"""Rows of a pool of 8 for 5 sequences; two of them are skipped."""


def step(case, tensors, impl, **options):
    arguments = {name: tensors[name] for name in ("q", "k", "v", "g", "u")}
    return ps.decode_step(case.variant, **arguments, scale=case.scale, impl=impl, **options)


def refusal(case, tensors, impl, state):
    """Why an implementation refuses a step, or None."""
    arguments = (*(tensors[name] for name in ("q", "k", "v", "g", "u")), None, torch.arange(case.B), state)
    return FAMILY.named(impl).refusal(ADVANCE.checked(f"decode_step({case.variant!r})", arguments, (case.scale,)), "advance")


def close(found, wanted, inputs):
    check_against({"it": found}, {"it": Wanted(wanted, float(wanted.norm()))}, inputs)


STEPS = [
    (Case(variant, B=5, T=T, K=K, V=V, state=False, dtype=dtype, others=others, scale=scale, strided=strided, shared=shared), pool, layout)
    for variant in VARIANTS
    for T, K, V, dtype, others, scale, strided, pool, layout, shared in [
        (1, 16, 16, FLOAT32, None, None, False, FLOAT32, "contiguous", ""),
        (3, 20, 36, FLOAT32, None, 0.3, False, FLOAT32, "heads first", ""),
        (16, 8, 3, FLOAT32, None, None, True, FLOAT32, "gaps", ""),
        (2, 64, 96, BFLOAT16, FLOAT32, None, False, FLOAT32, "contiguous", ""),
        (1, 16, 16, BFLOAT16, None, None, False, BFLOAT16, "gaps", ""),
        (3, 16, 16, FLOAT16, None, None, True, FLOAT16, "contiguous", ""),
        (3, 16, 24, FLOAT32, None, None, False, FLOAT64, "gaps", ""),
        (3, 16, 16, FLOAT64, None, None, False, FLOAT64, "heads first", ""),
        (1, 5, 7, FLOAT64, None, None, False, FLOAT32, "contiguous", ""),
        *((T, 16, 16, FLOAT32, None, None, False, FLOAT32, "contiguous", shared) for T, shared in zip((3, 3, 1, 3, 5), SHARED)),
    ]
]
IDS = [f"{case}-pool={str(pool).removeprefix('torch.')}-{layout}" for case, pool, layout in STEPS]


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize(("case", "dtype", "layout"), STEPS, ids=IDS)
def test_steps_equal_the_oracle(case, dtype, layout, impl):
    """Rows that are addressed advance; all others, and the memory between them, keep their bits; skipped outputs are 0."""
    tensors = draw(case)
    state, memory = pool_of(8, case, dtype, layout)
    before, untouched = state.clone(), memory.clone()
    slots = torch.tensor(SLOTS)
    if case.strided:
        slots = slots.repeat_interleave(2)[::2]
    reason = refusal(case, tensors, impl, state)
    if reason is not None:
        with pytest.raises(ps.ImplementationRefused, match=re.escape(reason)):
            step(case, tensors, impl, state=state, slots=slots)
        assert torch.equal(memory, untouched)
        return
    output = step(case, tensors, impl, state=state, slots=slots)
    live = [n for n, slot in enumerate(SLOTS) if slot >= 0]
    rows = [SLOTS[n] for n in live]
    wanted, wanted_state = exact(case, tensors, before[torch.tensor(SLOTS).clamp(min=0)])
    assert output.dtype == case.dtype
    assert output.shape == wanted.shape
    close(output[live], wanted[live], case.dtype)
    close(state[rows], wanted_state[live], case.dtype)
    assert output[[n for n, slot in enumerate(SLOTS) if slot < 0]].eq(0).all()
    state[rows] = before[rows]
    assert torch.equal(memory, untouched)


@pytest.mark.parametrize(("slots", "shared"), [(None, ""), (torch.int32, ""), (torch.int64, ""), (None, "H")], ids=str)
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_token_axis_may_be_left_out(variant, impl, slots, shared):
    """[N,H,K] is [N,1,H,K] without the axis; without slots, sequence n is row n."""
    case = Case(variant, B=4, T=1, state=False, shared=shared)
    tensors = draw(case)
    flat = {name: x if x is None or name == "u" or (name == "g" and "T" not in case.row.decay) else x[:, 0] for name, x in tensors.items()}
    (one, _), (other, _) = pool_of(4, case, FLOAT32), pool_of(4, case, FLOAT32)
    wanted, wanted_state = exact(case, tensors, one)
    output = step(case, flat, impl, state=one, slots=None if slots is None else torch.arange(4, dtype=slots))
    assert torch.equal(output, step(case, tensors, impl, state=other)[:, 0])
    assert torch.equal(one, other)
    close(output, wanted[:, 0], FLOAT32)
    close(one, wanted_state, FLOAT32)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_the_whole_sequence(variant, impl):
    """Generation: the state of a prompt, then a token at a time, in a pool of float32."""
    case = Case(variant, B=2, T=24, state=False)
    tensors = draw(case)
    whole = call(case, tensors, impl)

    def span(begin, end):
        return {n: x if x is None or (n == "g" and "T" not in case.row.decay) or n == "u" else x[:, begin:end] for n, x in tensors.items()}

    state = call(case, span(0, 13), impl).final_state
    outputs = [step(case, span(t, t + 1), impl, state=state) for t in range(13, 24)]
    close(torch.cat(outputs, 1), whole.output[:, 13:].double(), FLOAT32)
    close(state, whole.final_state.double(), FLOAT32)


@pytest.mark.parametrize("impl", NAMES)
def test_default_decay_of_retention(impl):
    case = Case("retention", B=2, T=3, state=False)
    tensors = draw(case)
    gamma = 1 - 2 ** (-5 - torch.arange(case.H, dtype=torch.float64))
    (one, _), (other, _) = pool_of(2, case, FLOAT32), pool_of(2, case, FLOAT32)
    found = step(case, tensors | {"g": None}, impl, state=one)
    close(found, step(case, tensors | {"g": gamma.log()}, impl, state=other).double(), FLOAT32)
    close(one, other.double(), FLOAT32)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("slots", [torch.tensor([-1, -1]), torch.tensor([-1]).expand(3), torch.tensor([], dtype=torch.int64)], ids=str)
def test_no_live_slots_leave_the_pool_unchanged(impl, slots):
    case = Case("gla", B=len(slots), T=1, state=False)
    state, memory = pool_of(3, case, FLOAT32)
    before = memory.clone()
    assert step(case, draw(case), impl, state=state, slots=slots).eq(0).all()
    assert torch.equal(memory, before)


@pytest.mark.parametrize("impl", NAMES)
def test_no_gradients_are_recorded(impl):
    """Inputs that require gradients are taken under no_grad, and the pool stays a plain tensor."""
    case = Case("rwkv6", B=2, T=2, state=False)
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    state, _ = pool_of(2, case, FLOAT32)
    with torch.no_grad():
        output = step(case, tensors, impl, state=state)
    assert not output.requires_grad
    assert not state.requires_grad
