"""The work and the memory of backward passes in plain PyTorch grow linearly with the number of tokens."""

from dataclasses import replace

import pytest
import torch
from allocations import allocations
from cases import Case

from penstock.recurrence import chunkwise, reference
from penstock.recurrence.variants import VARIANTS
from penstock.tokens import chunks

LAYOUTS = {
    "plain": lambda T: {"T": T, "state": False},
    "batch": lambda T: {"T": 64, "B": T // 64},
    "packed": lambda T: {"lengths": (T // 2, *(16,) * (T // 32)), "reverse": True},
}
LINEAR = {
    "chunkwise": (chunkwise.IMPLEMENTATION.gradients, 64, 2048),
    "autograd through chunkwise.forward": (replace(chunkwise.IMPLEMENTATION, backward=None).gradients, 64, 2048),
    "reference": (reference.IMPLEMENTATION.gradients, 8, 128),
}
"""The backward pass, the head size, and the number of tokens to begin with."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backward", LINEAR)
@pytest.mark.parametrize("variant", VARIANTS)
def test_work_of_the_backward_pass_is_linear(variant, backward, layout):
    """Four times the tokens take four times the bytes of intermediates, gradients of slices included."""
    run, size, T = LINEAR[backward]
    of = Case(variant, B=1, H=1, K=size, V=size)
    one, four = (allocations(replace(of, **LAYOUTS[layout](tokens)), run)[0].total for tokens in (T, 4 * T))
    assert four <= 4.5 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_of_the_backward_pass(variant, layout, dtype, monkeypatch):
    """Without a lower limit for the size of blocks, 4096 tokens are a long sequence."""
    monkeypatch.setattr(chunks, "BLOCK", 1)
    check_memory(Case(variant, B=1, H=1, K=64, V=64, dtype=dtype), **LAYOUTS[layout](1 << 12))


def test_memory_of_the_backward_pass_of_a_long_sequence():
    check_memory(Case("rwkv6", B=1, H=1, K=64, V=64), T=1 << 15)


def check_memory(of, **options):
    """``chunkwise`` takes at most 3 times the bytes of inputs and outputs, beyond these and the gradients."""
    found, inputs, outputs = allocations(replace(of, **options), chunkwise.IMPLEMENTATION.gradients)
    assert found.peak - inputs <= 3 * (inputs + outputs)
