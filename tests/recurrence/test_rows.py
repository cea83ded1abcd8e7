"""Rows of the table that no published variant has, and problems that do not fit their row, with every implementation."""

import pytest
import torch

import penstock as ps
from penstock.gpu.target import interpreting
from penstock.recurrence.declaration import in_place, over_sequences
from penstock.recurrence.operators import ADVANCE, FAMILY, RECURRENCE
from penstock.recurrence.variants import VARIANTS, Variant

DECAYS = ("", "H", "BTH", "HK", "BTHK")
SIZES = {"B": 1, "T": 5, "H": 2, "K": 16}
ROWS = {f"{decay or 'none'}, no bonus": Variant("toy", decay, "previous", False, None, "q", "g", "none") for decay in DECAYS}
ROWS |= {f"{decay or 'none'}, bonus": Variant("toy", decay, "previous", True, None, "q", "g", "none") for decay in DECAYS}
ROWS |= {name: row for name, row in VARIANTS.items()}
ALL = pytest.mark.parametrize("one", FAMILY.implementations, ids=lambda one: one.name)


def problems(row, monkeypatch, dtype=torch.float64):
    """A call over sequences and one in place, with values."""
    monkeypatch.setitem(RECURRENCE.signatures, row.name, over_sequences(row))
    monkeypatch.setitem(ADVANCE.signatures, f"advance({row.name!r})", in_place(row, "advance"))
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 16, generator=random, dtype=dtype) for _ in range(3))
    wide = dtype if dtype == torch.float64 else torch.float32
    g = -torch.rand([SIZES[axis] for axis in row.decay], generator=random, dtype=wide) if row.decay else None
    u = torch.randn(2, 16, generator=random, dtype=wide) if row.bonus else None
    whole = RECURRENCE.checked(row.name, (q, k, v, g, u, None, None), (1.0, False, True))
    state = torch.zeros(1, 2, 16, 16, dtype=wide)
    return whole, ADVANCE.checked(f"advance({row.name!r})", (q, k, v, g, u, None, None, state), (1.0,))


def formula(p):
    """The output, token by token, as the table has it."""
    q, k, v = (x.double() for x in (p.q, p.k, p.v))
    decay = torch.zeros_like(q) if p.gate is None else p.gate.double().expand(q.shape)
    state, outputs = q.new_zeros(1, 2, 16, 16), []
    for t in range(5):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        after = decay[:, t].exp()[..., None] * state + new
        u = 0 if p.u is None else p.u.double()[None, ..., None]
        read = after if p.variant.read == "updated" else state + u * new
        outputs.append((q[:, t, :, :, None] * read).sum(2))
        state = after
    return torch.stack(outputs, 1)


def reasons(one, whole, pooled):
    return [one.refuses(problem, mode) for mode, problem in (("forward", whole), ("backward", whole), ("advance", pooled))]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@ALL
def test_implementations_compute_the_formula_of_a_row_or_refuse_it(one, row, monkeypatch):
    """The oracle computes every row."""
    if one.name.startswith("triton") and not interpreting():
        pytest.skip("needs Triton's interpreter")
    ran = False
    for dtype in (torch.float64, torch.float32):
        whole, pooled = problems(row, monkeypatch, dtype)
        forward, _, advance = reasons(one, whole, pooled)
        for reason, run in ((forward, lambda p=whole: one.forward(p)[0]), (advance, lambda p=pooled: one.advance(p))):
            if reason is None and one.available() is None and not (one.advance is None and run.__defaults__[0] is pooled):
                torch.testing.assert_close(run().double(), formula(whole), rtol=1e-4, atol=1e-4)
                ran = True
    assert ran or one.name != "reference"


@pytest.mark.parametrize("decay", DECAYS)
@ALL
def test_the_previous_state_without_a_bonus_is_refused_with_the_reason(one, decay, monkeypatch):
    whole, pooled = problems(ROWS[f"{decay or 'none'}, no bonus"], monkeypatch, torch.float32)
    wanted = None if one.name == "reference" else "it reads the previous state only with a bonus, toy has none"
    assert reasons(one, whole, pooled) == [wanted] * 3


@pytest.mark.parametrize("name", VARIANTS)
@ALL
def test_problems_whose_bonus_is_not_that_of_their_row_are_refused(one, name, monkeypatch):
    """A row with a bonus without u, and one without a bonus with a u."""
    for problem in problems(VARIANTS[name], monkeypatch, torch.float32):
        u = None if VARIANTS[name].bonus else torch.zeros(2, 16)
        wanted = f"{name} has a bonus, and u is missing" if VARIANTS[name].bonus else f"{name} has no bonus, and there is a u"
        wrong, mode = problem.with_tensors({"u": u}), problem.operator.mode
        assert one.refuses(wrong, mode) == wanted


def test_rows_that_read_the_updated_state_have_no_bonus():
    with pytest.raises(ps.RangeError, match=r"Variant: bonus must be False where the updated state is read, got True for 'toy'\."):
        Variant("toy", "BTH", "updated", True, None, "q", "g", "none")
