"""The contract of every implementation of every operator, derived from the operator's declaration.

A case is a call: it has ``operator``, ``function``, ``options``, ``tensors()`` by the declared names of the arguments, ``upstream()``
(gradients of the results), ``call()`` (the public function) and ``check()`` (results against the oracle). ``cases``, ``pools`` and
``attention`` have those of this library's operators.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.call.operator import Operator
from penstock.call.problem import Problem

Tensors = dict[str, Tensor | None]


class Case(Protocol):
    """A call of an operator."""

    operator: Operator[Any]
    function: str
    options: tuple[Any, ...]

    def tensors(self, device: str = "cpu") -> Tensors: ...
    def upstream(self, device: str = "cpu") -> tuple[Tensor, ...]: ...
    def call(self, tensors: Tensors, impl: str) -> Any: ...
    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None: ...


def shortened(value: object) -> str:
    """A value in the name of a test."""
    return str(value).removeprefix("torch.").replace(" ", "")


def problem_of(case: Case, tensors: Tensors) -> Any:
    """The validated call."""
    return case.operator.checked(case.function, [tensors.get(name) for name in case.operator.names], case.options)


def measured(case: Case, impl: str, device: str = "cpu") -> dict[str, Tensor]:
    """The results of a case: see ``run``."""
    return run(case, case.tensors(device), case.upstream(device), impl)


def run(case: Case, tensors: Tensors, upstream: tuple[Tensor, ...], impl: str) -> dict[str, Tensor]:
    """All results by name, and ``dx`` for every differentiable argument x; for an operator in place, output and written argument."""
    operator = case.operator
    arguments, names = operator.signatures[case.function].arguments, [one.name for one in operator.results]
    if operator.in_place:
        written = next(one.name for one in arguments if one.written)
        return {names[0]: case.call(tensors, impl), written: tensors[written]}
    given = [one.name for one in arguments if one.gradient and tensors[one.name] is not None]
    leaves = {name: tensors[name].detach().requires_grad_() for name in given}
    results = case.call(tensors | leaves, impl)
    grads = torch.autograd.grad(results, tuple(leaves.values()), upstream)
    found = [x.detach().clone() for x in results]
    for x in results:
        x.zero_()  # a caller may change results in place: autograd refuses that for views
    return dict(zip(names, found)) | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def check_contract(case: Case, impl: str, device: str = "cpu") -> None:
    """Results and gradients equal the oracle, or the call raises the reason of a refusal and changes nothing."""
    tensors, one = case.tensors(device), case.operator.family.named(impl)
    problem = problem_of(case, tensors)
    reason = one.refusal(problem.whole, case.operator.mode)
    if reason is not None:
        before = {name: x.clone() for name, x in tensors.items() if x is not None}
        with pytest.raises(ps.ImplementationRefused, match=re.escape(reason)):
            case.call(tensors, impl)
        assert all(torch.equal(tensors[name], x) for name, x in before.items())
        return
    check_results(case, impl, device)


def check_results(case: Case, impl: str, device: str = "cpu") -> None:
    """Results and gradients equal the oracle."""
    tensors = case.tensors(device)
    problem = problem_of(case, tensors)
    found = run(case, tensors, case.upstream(device), impl)
    check_declared(problem, found)
    case.check(found, impl, device)


LAZY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "negated": (lambda x: torch._neg_view(-x), lambda x: x),
    "imaginary part of a conjugate": (lambda x: torch.complex(x, -x).conj().imag if x.itemsize > 2 else torch._neg_view(-x), lambda x: x),
    "zeros": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device), torch.zeros_like),
}
"""Tensors that torch has not computed yet, and the same in memory."""


def takers(case: Case) -> list[str]:
    """The implementations that take a case on this machine."""
    operator, problem = case.operator, problem_of(case, case.tensors()).whole
    return [one.name for one in operator.family.implementations if one.refusal(problem, operator.mode) is None]


def check_lazy(case: Case, impl: str, kind: str, together: bool = False) -> None:
    """Lazy arguments and lazy gradients of the results, each alone or all together, give what tensors in memory give."""
    lazy, resolved = LAZY[kind]
    tensors, upstream = case.tensors(), case.upstream()
    pools = {one.name for one in case.operator.arguments if one.written}

    def found(of: Callable[[Tensor], Tensor], which: tuple[str, ...]) -> dict[str, Tensor]:
        given = {name: of(x) if name in which else x.clone() if name in pools else x for name, x in tensors.items() if x is not None}
        d_results = tuple(of(d) if f"d{place}" in which else d for place, d in enumerate(upstream))
        return run(case, dict.fromkeys(tensors) | given, d_results, impl)

    every = [name for name, x in tensors.items() if x is not None and x.is_floating_point() and name not in pools]
    every += [] if case.operator.in_place else [f"d{place}" for place in range(len(upstream))]
    for which in [tuple(every)] if together else [(name,) for name in every]:
        wanted = found(resolved, which)
        for name, x in found(lazy, which).items():
            # torch.nn.functional.scaled_dot_product_attention rounds otherwise for lazy zeros
            close = torch.allclose(x, wanted[name], rtol=0, atol=1e-6) if kind == "zeros" else torch.equal(x, wanted[name])
            assert close, (which, name)


def check_declared(problem: Problem, found: dict[str, Tensor]) -> None:
    """Shapes and dtypes as declared; results contiguous; gradients like their arguments."""
    first = problem.tensors[0]
    for one in problem.operator.results:
        x = found[one.name]
        assert list(x.shape) == [problem.sizes[axis] for axis in one.axes.split()], one.name
        assert x.dtype == one.dtype(first.dtype), one.name
        assert x.is_contiguous(), one.name
    for one in problem.signature.arguments:
        x = found.get(f"d{one.name}")
        if x is not None:
            given = getattr(problem, one.name)
            assert (x.shape, x.dtype) == (given.shape, given.dtype), one.name
