"""Kernels of pieces read tensors whose loads do not depend on the caller's strides and addresses, in every family."""

import pytest
import torch
from cases import spread

from penstock.delta.variants import VARIANTS as delta_variants
from penstock.recurrence.variants import VARIANTS as recurrence_variants
from penstock.tokens.gpu_pieces import APART, arranged, plain
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs

triton = pytest.importorskip("triton")
VARIANTS = [*recurrence_variants, *delta_variants]


def problem(variant, T, change):
    """An update in place of packed tokens, whose tensors ``change`` has laid out."""
    x = inputs(variant, Shape.parse(f"1,{T},2,16"))
    laid = {name: change(one, n) for n, (name, one) in enumerate(x.tensors.items())}
    offsets = torch.tensor([0, T])
    return Inputs.of(variant, laid).in_place(torch.zeros(2, 2, 16, 16), torch.tensor([1]), offsets)


def shifted(x, n):
    """The same values at an address that is no multiple of 16 bytes."""
    found = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return found.copy_(x)


def operands(p):
    return {name: getattr(p, name) for name in p.signature.axes if name not in APART and getattr(p, name) is not None}


@pytest.mark.parametrize("change", [spread, shifted])
@pytest.mark.parametrize("variant", VARIANTS)
def test_launches_with_pieces_get_plain_tensors(variant, change, monkeypatch):
    from penstock.delta.triton import launch as delta
    from penstock.recurrence.triton import launch as recurrence

    seen = []

    def record(name, p, target, plan, tensors, *others):
        seen.append({one: x for one, x in tensors.items() if x is not None and one not in APART})
        return {"output": p.v}

    monkeypatch.setattr(recurrence.launch, "run", record)
    long, short = problem(variant, 100, change), problem(variant, 20, change)
    run = (delta if variant in delta_variants else recurrence).advance
    run(long)
    run(short)
    given, few = seen
    assert len(given) >= 3
    for name, x in given.items():
        assert plain(x), name
        assert torch.equal(x, getattr(long, name)), name
    assert all(x.data_ptr() == getattr(short, name).data_ptr() for name, x in few.items()), "decode steps copy nothing"


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_tensors_are_not_copied(variant):
    p = problem(variant, 100, lambda x, n: x)
    assert arranged(p) is p


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_have_the_strides_of_new_tensors(variant):
    p = arranged(problem(variant, 100, spread))
    for name, x in operands(p).items():
        assert x.stride() == torch.empty(x.shape).stride(), name


def wide(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (wide(1, 100, 2, 64), True),
        (wide(1, 200, 2, 64)[:, 100:], True),
        (wide(3, 100, 4, 64)[:, :, 1:3], True),  # a slice along heads
        (wide(1, 100, 4, 36)[:, :, 1:3], False),
        (wide(1, 100, 2, 65)[..., 1:], False),
        (wide(2, 200, 2, 64)[:, 100:], False),
        (wide(16385)[:12800].as_strided((1, 100, 2, 64), (16385, 128, 64, 1)), False),
        (wide(1, 100, 1, 64).as_strided((1, 100, 1, 64), (6400, 64, 1, 1)), False),
        (wide(1, 100, 1, 64).expand(1, 100, 4, 64), False),
        (wide(1, 100, 8), True),
        (wide(1, 100, 16)[..., 8:], False),
        (wide(1, 101, 1)[:, 1:], False),
        (wide(8), True),
        (wide(16)[::2], False),
    ],
)
def test_plain(x, wanted):
    assert plain(x) == wanted
