"""The work and the memory of backward passes in plain PyTorch grow linearly with the number of tokens."""

import weakref
from dataclasses import replace

import pytest
import torch
from cases import Case, draw, problem_of, upstream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.call.implementation import Upstream
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


class Allocations(TorchDispatchMode):
    """Counts the bytes of the results of all operations: in total, and the most at a time."""

    def __init__(self):
        super().__init__()
        self.total = self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = func(*args, **kwargs or {})
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return results

    def _count(self, size):
        self.total += max(size, 0)
        self.now += size
        self.peak = max(self.peak, self.now)


def allocations(case, backward):
    """What a backward pass allocates, and the bytes of the inputs (as many as of their gradients) and of the outputs."""
    tensors = draw(case)
    problem = problem_of(case, tensors)
    with torch.no_grad(), Allocations() as found:
        backward(problem, Upstream(upstream(case)))
    inputs, outputs = (sum(x.nbytes for x in some if x is not None) for some in (tensors.values(), upstream(case)))
    return found, inputs, outputs


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
