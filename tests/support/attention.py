"""Calls of softmax attention: inputs, results of the oracle, and error budgets."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from cases import share
from contract import Tensors, problem_of, shortened
from torch import Tensor

import penstock as ps
from penstock.softmax import reference
from penstock.softmax.declaration import FUNCTION
from penstock.softmax.operators import ATTENTION, FAMILY

FLOAT32, FLOAT64 = torch.float32, torch.float64
IMPLEMENTATIONS = [one.name for one in FAMILY.implementations]
ROUNDS_INSIDE = {"sdpa": 4.0}
"""Units of rounding of 16-bit operands where a kernel of ours has 1: torch does not say how it rounds."""


@dataclass(frozen=True)
class Attention:
    """One call: its sizes, and what is unusual about it."""

    operator: ClassVar = ATTENTION
    function: ClassVar = FUNCTION

    B: int = 2
    Tq: int = 70
    Tk: int = 70
    H: int = 2
    G: int = 1
    D: int = 16
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    dtype: torch.dtype = FLOAT32
    lengths: tuple[tuple[int, int], ...] | None = None
    """of packed sequences, queries and keys; then B, Tq and Tk follow from them"""
    strided: bool = False
    shared: str = ""
    """axes of "BTHD" along which all elements of a tensor lie in one place (strides of 0), or "overlap": as in ``cases``"""
    large: float = 1.0
    """factor of q, for scores beyond the range of exp"""

    def __str__(self) -> str:
        changed = [f"{f.name}={shortened(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(["softmax", *changed])

    @property
    def options(self) -> tuple[object, ...]:
        return self.causal, self.scale, self.window, True

    def tensors(self, device: str = "cpu") -> Tensors:
        """By the declared names of the arguments."""
        return self.drawn(device)[0]

    def upstream(self, device: str = "cpu") -> tuple[Tensor, ...]:
        return self.drawn(device)[1]

    def drawn(self, device: str) -> tuple[Tensors, tuple[Tensor, ...]]:
        """Arguments, and gradients of output and log-sum-exp."""
        made = torch.Generator(device).manual_seed(0)
        B, Tq, Tk, offsets = self.B, self.Tq, self.Tk, (None, None)
        if self.lengths is not None:
            B, Tq, Tk = 1, *(sum(length[side] for length in self.lengths) for side in (0, 1))
            offsets = tuple(torch.tensor([0, *(length[side] for length in self.lengths)], device=device).cumsum(0) for side in (0, 1))

        def normal(*size: int) -> Tensor:
            if self.strided:
                B, T, H, D = size
                return torch.randn(B, H, D, T, generator=made, device=device).permute(0, 3, 1, 2).to(self.dtype)
            return torch.randn(*size, generator=made, device=device).to(self.dtype)

        q, k, v = normal(B, Tq, self.H, self.D) * self.large, normal(B, Tk, self.G, self.D), normal(B, Tk, self.G, self.D)
        d_output = normal(B, Tq, self.H, self.D)
        dtype = torch.promote_types(FLOAT32, self.dtype)
        d_lse = torch.randn(B, Tq, self.H, generator=made, device=device).to(dtype)
        q, k, v, d_output, d_lse = (share(x, "BTHD"[: x.dim()], self.shared) for x in (q, k, v, d_output, d_lse))
        tensors = {"q": q, "k": k, "v": v, "cu_seqlens": offsets[0], "cu_seqlens_k": offsets[1]}
        return tensors, (d_output, d_lse)

    def call(self, tensors: Tensors, impl: str) -> tuple[Tensor, Tensor]:
        options = {"causal": self.causal, "scale": self.scale, "window": self.window, "return_lse": True}
        return ps.softmax_attention(**tensors, **options, impl=impl)

    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None:
        """Entry by entry where operands are rounded."""
        wanted, lost = exact(self, device)
        unit, times = torch.finfo(self.dtype).eps / 2, ROUNDS_INSIDE.get(impl, 1.0)
        for name, x in found.items():
            y = wanted[name]
            none = y == float("-inf")
            assert torch.equal(x == float("-inf"), none), name
            apart = (x.double() - y).masked_fill(none, 0).abs()
            sizes = y.masked_fill(none, 0).abs()
            largest = float(sizes.max()) if y.numel() else 0.0
            if self.shared and y.numel():  # terms of equal keys cancel
                largest = max(largest, float(lost[name].max()))
            allowed = {FLOAT64: 1e-12, FLOAT32: 2e-6}.get(self.dtype, 4e-6) * max(largest, 1e-3) * max(1.0, self.large)
            if self.dtype.itemsize == 2 and name != "lse":
                allowed = allowed + times * unit * (lost[name] + sizes)
            assert bool((apart <= allowed).all()), f"{name}: {float((apart - allowed).max()):.2e} beyond what is allowed"


def exact(case: Attention, device: str = "cpu", upstream: tuple[Tensor, ...] | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and gradients in float64, and what each entry loses for each unit of rounding of the operands of products.

    p and ds are rounded before they are multiplied, the output before delta is made of it: 1 unit each of the sums of absolute values.
    """
    tensors, drawn = case.drawn(device)
    d_output, d_lse = upstream or drawn
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    a = problem_of(case, tensors | {"q": q, "k": k, "v": v})
    output, lse = reference.exact(a)
    d_lse = d_lse.double().masked_fill(lse == float("-inf"), 0.0)  # of a row that sees nothing
    dq, dk, dv = torch.autograd.grad((output, lse.masked_fill(lse == float("-inf"), 0.0)), (q, k, v), (d_output.double(), d_lse))
    results = {"output": output.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    lost = {name: torch.zeros_like(x) for name, x in results.items()}
    Tq, Tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    for rows, keys in [(slice(0, Tq), slice(0, Tk))] if a.cu_seqlens is None else a.spans():
        Q, O, dO = (x[:, rows].detach().double() for x in (q, output, d_output))
        K, V = (x[:, keys].detach().repeat_interleave(group, 2) for x in (k, v))
        queries = rows.stop - rows.start
        visible = a.visible(slice(0, queries), slice(0, keys.stop - keys.start), queries, keys.stop - keys.start)
        e = lse[:, rows].detach().transpose(1, 2)[..., None]
        p = torch.exp((a.scale * torch.einsum("bihd,bjhd->bhij", Q, K) - e).masked_fill(~visible | ~e.isfinite(), float("-inf")))
        delta = ((O * dO).sum(-1) - d_lse[:, rows]).transpose(1, 2)[..., None]
        ds = (p * (torch.einsum("bihd,bjhd->bhij", dO, V) - delta)).abs() + p * (O * dO).abs().sum(-1).transpose(1, 2)[..., None]
        lost["output"][:, rows] = torch.einsum("bhij,bjhd->bihd", p, V.abs())
        lost["dq"][:, rows] = abs(a.scale) * torch.einsum("bhij,bjhd->bihd", ds, K.abs())
        by_head = {"dk": abs(a.scale) * torch.einsum("bhij,bihd->bjhd", ds, Q.abs()), "dv": torch.einsum("bhij,bihd->bjhd", p, dO.abs())}
        for name, x in by_head.items():
            lost[name][:, keys] = x.unflatten(2, (-1, group)).sum(3)
    return results, lost


SHARED = ("B", "T", "H", "D", "overlap")
"""What ``Attention.shared`` is tested with."""

PLAIN = Attention()
CASES = [
    PLAIN,
    *(replace(PLAIN, Tq=T, Tk=T) for T in (1, 2, 63, 64, 65, 130)),
    *(replace(PLAIN, Tq=Tq, Tk=Tk) for Tq, Tk in ((1, 130), (30, 100), (100, 30), (0, 5), (5, 0))),
    *(replace(PLAIN, Tq=Tq, Tk=Tk, causal=False) for Tq, Tk in ((70, 70), (65, 130), (130, 3))),
    *(replace(PLAIN, Tq=150, Tk=150, window=window, causal=causal) for window in (1, 40, 64, 100, 1000) for causal in (True, False)),
    *(replace(PLAIN, Tq=Tq, Tk=Tk, window=50, causal=causal) for Tq, Tk in ((40, 200), (200, 40)) for causal in (True, False)),
    *(replace(PLAIN, H=H, G=G) for H, G in ((1, 1), (4, 2), (6, 2), (3, 3))),
    *(replace(PLAIN, D=D) for D in (1, 20, 64, 100, 256)),
    replace(PLAIN, scale=-0.3),
    replace(PLAIN, strided=True, H=4, G=2),
    *(replace(PLAIN, shared=axes, H=4, G=2, window=window) for axes in SHARED for window in (None, 33)),
    replace(PLAIN, shared="BTHD", causal=False),
    replace(PLAIN, shared="T", lengths=((5, 20), (0, 7), (20, 5))),
    replace(PLAIN, large=300.0),
    *(replace(PLAIN, dtype=dtype, D=32) for dtype in (torch.float16, torch.bfloat16, FLOAT64)),
    replace(PLAIN, dtype=torch.float16, window=30, Tq=100, Tk=120),
    *(
        replace(PLAIN, lengths=lengths, window=window, H=4, G=2)
        for lengths in (((70, 70), (1, 1), (0, 0), (65, 65)), ((5, 100), (0, 7), (80, 0), (64, 64), (90, 20)), ((0, 0),))
        for window in (None, 33)
    ),
    replace(PLAIN, lengths=((64, 64), (30, 90)), causal=False, dtype=torch.float16),
]

SMALL_CASES = [
    *(replace(PLAIN, B=1, Tq=Tq, Tk=Tk) for Tq, Tk in ((65, 65), (1, 70), (70, 30), (0, 5), (5, 0))),
    *(replace(PLAIN, B=1, Tq=Tq, Tk=Tk, causal=False) for Tq, Tk in ((65, 70), (70, 3))),
    *(replace(PLAIN, B=1, Tq=130, Tk=130, H=1, window=window, causal=causal) for window, causal in ((1, True), (64, False), (100, True))),
    replace(PLAIN, B=1, Tq=40, Tk=140, H=1, window=50, causal=False),
    *(replace(PLAIN, Tq=20, Tk=20, H=H, G=G) for H, G in ((6, 2), (3, 3))),
    *(replace(PLAIN, B=1, Tq=20, Tk=20, D=D) for D in (1, 20, 100, 256)),
    *(replace(PLAIN, B=1, Tq=20, Tk=20, dtype=dtype, D=32) for dtype in (torch.float16, torch.bfloat16, FLOAT64)),
    replace(PLAIN, B=1, Tq=20, Tk=20, scale=-0.3),
    replace(PLAIN, Tq=20, Tk=20, strided=True, H=4, G=2),
    *(replace(PLAIN, Tq=20, Tk=20, shared=axes, H=4, G=2) for axes in SHARED),
    replace(PLAIN, B=1, Tq=20, Tk=20, large=300.0),
    replace(PLAIN, lengths=((65, 65), (1, 1), (0, 0), (5, 70)), window=33),
    replace(PLAIN, lengths=((5, 20), (0, 7), (20, 0), (20, 5))),
    replace(PLAIN, lengths=((0, 0),)),
]
"""Of these the smallest that still cross a tile, for the interpreter."""
