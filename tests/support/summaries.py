"""Calls of ``summary``: inputs, and results of the oracle."""

from dataclasses import dataclass, replace
from typing import ClassVar

import contract
import torch
from cases import Case, Wanted, check_against, draw
from torch import Tensor

import penstock as ps
from penstock.recurrence import summary
from penstock.recurrence.operators import SUMMARY
from penstock.tokens.dtypes import state_dtype


@dataclass(frozen=True)
class Summarized(Case):
    """A call of ``summary``, as the adjoint with the queries as k."""

    operator: ClassVar = SUMMARY

    adjoint: bool = False

    def __str__(self) -> str:
        return f"summary-{super().__str__()}"

    @property
    def function(self) -> str:
        return f"summary({self.variant!r})"

    @property
    def options(self) -> tuple[object, ...]:
        return self.scale, self.reverse, self.adjoint

    def tensors(self, device: str = "cpu") -> dict[str, Tensor | None]:
        drawn = draw(self)
        found = {"k": drawn["q" if self.adjoint else "k"], "v": drawn["v"], "g": drawn["g"], "initial_state": drawn["initial_state"]}
        return {name: None if x is None else x.to(device) for name, x in found.items()}

    def upstream(self, device: str = "cpu") -> tuple[Tensor, ...]:
        rng, dtype = torch.Generator().manual_seed(1), state_dtype(self.dtype)
        shapes = ([self.sizes[axis] for axis in axes] for axes in ("BHKV", "BHK"))
        return tuple(torch.randn(shape, dtype=torch.float64, generator=rng).to(dtype).to(device) for shape in shapes)

    def call(self, tensors: dict[str, Tensor | None], impl: str) -> ps.Summary:
        scale = 1.0 if self.scale is None else self.scale
        return ps.summary(self.variant, **tensors, scale=scale, reverse=self.reverse, adjoint=self.adjoint, impl=impl)

    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None:
        check_against({name: x.cpu() for name, x in found.items()}, self.exactly(), self.dtype)

    def exactly(self) -> dict[str, Wanted]:
        """The token loop in float64. A constant decay is given to it once a token, as in ``cases.oracle``."""
        tensors = {name: None if x is None else x.double() for name, x in self.tensors().items()}
        static, row = self.row.decay in ("H", "HK"), self
        if static:
            tensors["g"] = tensors["g"].expand(self.sizes["B"], self.sizes["T"], *tensors["g"].shape).clone()
            row = replace(self, variant={"H": "simple_gla", "HK": "rwkv6"}[self.row.decay])
        inputs = {name: x.requires_grad_() for name, x in tensors.items() if x is not None}
        results = summary.exact(contract.problem_of(row, tensors).whole)
        pairs = [(x, d.double()) for x, d in zip(results, self.upstream()) if x.requires_grad]
        outs, d_outs = [x for x, _ in pairs], [d for _, d in pairs]
        grads = torch.autograd.grad(outs, tuple(inputs.values()), d_outs, allow_unused=True, materialize_grads=True) if outs else [
            torch.zeros_like(x) for x in inputs.values()
        ]  # fmt: skip
        found = dict(zip(("state", "decay"), results)) | {f"d{name}": grad for name, grad in zip(inputs, grads)}
        wanted = {name: Wanted(x.detach(), float(x.detach().norm())) for name, x in found.items()}
        if static:
            terms = wanted["dg"].value
            wanted["dg"] = Wanted(terms.sum((0, 1)), float(terms.abs().sum((0, 1)).norm()))
        return wanted
