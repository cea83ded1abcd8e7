"""The launches of every form of every chain of layers, on its examples with the sizes of real models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..gpu.target import Target
from ..layers.chains import CHAINS, ChainForm, no_kernels
from ..layers.examples import Draw, Example
from ..layers.triton import launches_for
from ..verify.chains import chains, tensors
from .ahead import Job, noted_job

DTYPES = (torch.bfloat16, torch.float32)
"""float16 has the code of bfloat16 with other conversions."""


@dataclass(frozen=True)
class ChainCall:
    """The examples of a form in one dtype."""

    chain: str
    form: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name in tables and in the record."""
        return f"chain {self.chain} {str(self.dtype).removeprefix('torch.')}"

    @property
    def examples(self) -> tuple[Example, ...]:
        """The examples."""
        return tuple(one for one in CHAINS[self.chain].form(self.form).examples if one.dtype == self.dtype)

    def launches(self, target: Target) -> Iterator[tuple[str, Job]]:
        """Yield each launch with its name. There are none if the form has no code for the GPU or refuses its examples there."""
        found: dict[str, dict[Job, None]] = {}
        with launches_for(target) as launched:
            for example in self.examples:
                _run(self.chain, self.form, example)
            for one in launched:
                found.setdefault(one.kernel.fn.__name__, {})[noted_job(target.arch, one)] = None
        for kernel, jobs in found.items():
            for n, job in enumerate(jobs, 1):
                yield f"{self.name}: {self.form}: {kernel}" + f" {n}" * (n > 1), job


def _run(chain: str, form: str, example: Example) -> None:
    """A call of a form, with its backward pass. Its kernels do not run."""
    draw = Draw(example.dtype, torch.device("cpu"), gradients=example.gradients, real=True)
    one: ChainForm[Any, Any] = CHAINS[chain].form(form)
    with torch.set_grad_enabled(example.gradients), example.within():
        call = example.draw(draw)
        if one.absent(torch.device("cpu")) is not None or one.refuses(call) is not None:
            return
        results = [y for y in tensors(CHAINS[chain].computed(call, form)) if y.requires_grad]
        if results:
            torch.autograd.grad(results, list(draw.leaves.values()), [torch.zeros_like(y) for y in results], allow_unused=True)


def chain_calls() -> tuple[ChainCall, ...]:
    """All forms that launch kernels, in each of ``DTYPES`` in which they have examples."""
    forms = ((chain, form) for chain in chains() for form in chain.forms if form.kernels is not no_kernels)
    every = (ChainCall(chain.name, form.name, dtype) for chain, form in forms for dtype in DTYPES)
    return tuple(one for one in every if one.examples)
