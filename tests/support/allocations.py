"""The bytes that a backward pass in plain PyTorch allocates."""

import weakref

import torch
from contract import problem_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.call.implementation import Upstream


class Allocations(TorchDispatchMode):
    """Counts the bytes of the results of all operations that have memory: in total, and the most at a time."""

    def __init__(self):
        super().__init__()
        self.total = self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = func(*args, **kwargs or {})
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and not x.is_meta and (storage := x.untyped_storage())._cdata not in given:
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return results

    def _count(self, size):
        self.total += max(size, 0)
        self.now += size
        self.peak = max(self.peak, self.now)


def allocations(case, backward):
    """What a backward pass allocates, and the bytes of the inputs (as many as of their gradients) and of the outputs."""
    tensors, d_results = case.tensors(), case.upstream()
    problem = problem_of(case, tensors)
    with torch.no_grad(), Allocations() as found:
        backward(problem, Upstream(d_results))
    inputs, outputs = (sum(x.nbytes for x in some if x is not None) for some in (tensors.values(), d_results))
    return found, inputs, outputs
