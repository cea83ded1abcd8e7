"""Short convolutions written as a loop over tokens in float64, and what tests on a CPU and on a GPU share. No code of the package."""

from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

WIDTHS = (1, 2, 3, 4, 8)
PACKED = (0, 0, 33, 34, 36, 40, 40, 75)
"""Sequences of 0, 33, 1, 2, 4, 0 and 35 tokens."""
BATCH = (0, 25, 50, 75)


@dataclass(frozen=True)
class Case:
    """A convolution of 75 tokens."""

    W: int
    bounds: tuple[int, ...]
    bias: bool
    silu: bool
    dtype: torch.dtype
    C: int = 70

    def draw(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x [75,C] and tail [N,W-1,C] as columns of wider tensors, weight [C,W], bias [C] or None."""
        x, tail = normal(75, self.C + 26), normal(len(self.bounds) - 1, self.W - 1, self.C + 8, seed=1)
        weight, bias = normal(self.C, self.W, seed=2), normal(self.C, seed=3)
        x, tail, weight, bias = (one.to(device, self.dtype) for one in (x, tail, weight, bias))
        x, tail = x[:, 16:-10], tail[..., 8:]
        return x, tail, weight, bias if self.bias else None

    def offsets(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """The sequence that begins with each token, or -1, and where sequences begin, and the end."""
        starts = torch.full((75,), -1, dtype=torch.int32)
        for n, (begin, end) in enumerate(pairwise(self.bounds)):
            if begin < end:
                starts[begin] = n
        return starts.to(device), torch.tensor(self.bounds).to(device)


def cases(*dtypes: torch.dtype) -> list[Case]:
    """All widths; for some of them also without bias or silu."""
    options = [(W, True, True) for W in WIDTHS] + [(4, False, True), (4, True, False), (2, False, False)]
    return [Case(W, bounds, bias, silu, dtype) for (W, bias, silu), bounds, dtype in product(options, (PACKED, BATCH), dtypes)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Float64, on a CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(
    x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, ...], silu: bool, *, sizes: bool = False
) -> tuple[Tensor, Tensor]:
    """y [R,C] and the new tail. ``sizes``: in place of y, the sum of the sizes of the summands before silu."""
    W, y, tails = weight.shape[1], [], []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        past = [*tail[n], *x[begin:end]]
        for t in range(end - begin):
            z = torch.zeros_like(weight[:, 0]) if bias is None else bias
            for j in range(W):
                z = z + weight[:, j] * past[t + j]
            y.append(z * torch.sigmoid(z) if silu and not sizes else z)
        tails.append(torch.stack(past[len(past) - W + 1 :]) if W > 1 else tail[n])
    return torch.stack(y), torch.stack(tails)


def check(case: Case, convolution, formula, device: str = "cpu") -> None:
    """Results and gradients of the autograd function ``convolution``, element by element. Units of all errors: a rounding of float32.

    z has W + 1 roundings of at most ``sizes``. silu and its derivative pass on at most 1.1 and 0.5 of that, and have less than 16 roundings
    of values up to 1.1 of their own. A gradient is a sum of up to 75 terms, or W for that of x; each addition rounds once.
    """
    every, once, least = torch.finfo(torch.float32).eps / 2, torch.finfo(case.dtype).eps / 2, torch.finfo(case.dtype).smallest_normal
    leaves = [None if one is None else one.detach().requires_grad_(n != 1) for n, one in enumerate(case.draw(device))]
    x, tail, weight, bias = leaves
    y, after = convolution.apply(x, tail, *case.offsets(device), weight, bias, case.silu, formula)
    exact = [None if one is None else one.detach().cpu().double().requires_grad_() for one in leaves]
    wanted, tails = loop(*exact, case.bounds, case.silu)
    assert y.dtype == after.dtype == case.dtype
    assert torch.equal(after.cpu().double(), tails)
    absolute = [None if one is None else one.detach().abs().requires_grad_() for one in exact]
    sizes, _ = loop(*absolute, case.bounds, case.silu, sizes=True)
    allowed = 1.1 * (case.W + 1) * sizes + 16 * wanted.abs()
    assert ((y.cpu().double() - wanted).abs() <= every * allowed + once * (wanted.abs() + least)).all()

    upstream = normal(75, case.C + 6, seed=5).to(case.dtype)
    learned = [n for n in (0, 2, 3) if leaves[n] is not None]
    grads = torch.autograd.grad(y, [leaves[n] for n in learned], upstream.to(device)[:, 6:])
    upstream = upstream[:, 6:].double()
    true = torch.autograd.grad(wanted, [exact[n] for n in learned], upstream)
    z, _ = loop(*(None if one is None else one.detach() for one in exact), case.bounds, False)
    slope = torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z))) if case.silu else torch.ones_like(z)
    for n, found, one in zip(learned, grads, true):
        terms = case.W if n == 0 else 75
        errors = upstream.abs() * (16 + 0.5 * (case.W + 1) * sizes.detach() + terms * slope.abs())
        (allowed,) = torch.autograd.grad(sizes, absolute[n], errors, retain_graph=True)
        assert found.dtype == case.dtype
        assert ((found.cpu().double() - one).abs() <= every * allowed + once * (one.abs() + least)).all(), n
