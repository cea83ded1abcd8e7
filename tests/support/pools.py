"""Calls that update a pool of states in place: inputs, the memory of the pool, and results of the oracle."""

from dataclasses import dataclass
from typing import ClassVar

import contract
import torch
from cases import Case, Wanted, check_against, offsets
from torch import Tensor

import penstock as ps
from penstock.recurrence import reference
from penstock.recurrence.operators import ADVANCE


def pool_of(rows: int, case: Case, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    """A state pool, and all of its memory."""
    rng = torch.Generator().manual_seed(2)
    values = torch.randn(rows, case.H, case.K, case.V, dtype=torch.float64, generator=rng).to(dtype)
    if layout == "contiguous":
        return values, values
    if layout == "heads first":
        memory = values.transpose(0, 1).contiguous()
        return memory.transpose(0, 1), memory
    memory = torch.full((rows, case.H, case.K + 2, 2 * case.V), 7.0, dtype=dtype)
    memory[:, :, 1:-1, ::2] = values
    return memory[:, :, 1:-1, ::2], memory


def exact(case: Case, tensors: dict[str, Tensor | None], state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and states of the oracle begun at ``state``, one row a sequence."""
    double = {name: None if x is None else x.double() for name, x in tensors.items()} | {"initial_state": state.double()}
    return reference.exact(contract.problem_of(Case(case.variant, scale=case.scale), {"cu_seqlens": offsets(case)} | double).whole)


@dataclass(frozen=True)
class Pooled(Case):
    """A call of ``advance``: sequence n goes on from row ``slots[n]`` of a pool of ``rows``, or from row n."""

    operator: ClassVar = ADVANCE

    state: bool = False
    rows: int = 8
    slots: tuple[int, ...] | None = None
    pool: torch.dtype = torch.float32
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"advance-{super().__str__()}"

    @property
    def function(self) -> str:
        return f"advance({self.variant!r})"

    @property
    def options(self) -> tuple[object, ...]:
        return (self.scale,)

    def tensors(self, device: str = "cpu") -> dict[str, Tensor | None]:
        drawn = {name: x for name, x in self.drawn().items() if name != "initial_state"}
        slots = None if self.slots is None else torch.tensor(self.slots, dtype=torch.int64)
        if self.strided and slots is not None:
            slots = slots.repeat_interleave(2)[::2]
        pool, _ = pool_of(self.rows, self, self.pool, self.layout)
        tensors = drawn | {"cu_seqlens": offsets(self), "slots": slots, "state": pool}
        return {name: None if x is None else x.to(device) for name, x in tensors.items()}

    def exact(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Output and states of the oracle begun at ``state``, one row a sequence."""
        return exact(self, self.drawn(), state)

    def more(self, impl: str, exactly: dict[str, Tensor]) -> dict[str, float]:
        """What is added to the budget of a result."""
        return {}

    def call(self, tensors: dict[str, Tensor | None], impl: str) -> Tensor:
        return ps.advance(self.variant, **tensors, scale=self.scale, impl=impl)

    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None:
        """Rows that are addressed go on; the others keep their bits; outputs of skipped sequences are 0."""
        tensors = self.tensors()
        pool, N = tensors["state"], self.sizes["N"]
        slots = torch.arange(N) if tensors["slots"] is None else tensors["slots"]
        output, states = self.exact(pool[slots.clamp(min=0)])
        skipped = slots < 0
        of_token = skipped.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64)) if self.lengths is not None else None
        output[(slice(None), of_token) if of_token is not None else skipped] = 0
        wanted = pool.double().clone()
        wanted[slots[~skipped]] = states[~skipped]
        exactly = {"output": output, "state": wanted}
        found = {name: x.cpu() for name, x in found.items()}
        check_against(found, {name: Wanted(x, float(x.norm())) for name, x in exactly.items()}, self.dtype, self.more(impl, exactly))
        untouched = torch.ones(self.rows, dtype=torch.bool)
        untouched[slots[~skipped]] = False
        assert torch.equal(found["state"][untouched], pool[untouched])
        assert not found["output"][(slice(None), of_token) if of_token is not None else skipped].any()


def check_untouched(state, memory, before, touched):
    """Only the ``touched`` rows of a pool have changed, in memory that was ``before``. Changes both."""
    state[touched] = 0
    after = memory.clone()
    memory.copy_(before)
    state[touched] = 0
    assert torch.equal(after, memory)
