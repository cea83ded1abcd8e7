"""The exact results of one call, computed once by the oracle. Every candidate is compared with them before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PenstockError
from ..tokens.shape import Shape
from ..verify import oracle, rounding
from ..verify.inputs import Inputs
from ..verify.machine import using_threads
from .calls import d_output, output_and_gradients, states
from .candidates import Candidate, Mode
from .clock import on_gpu, seconds_of

NOT_FINITE = "has values that are not finite"


class OracleLimit(NamedTuple):
    """How many tokens the oracle computes.

    Longer calls are checked on their first tokens. The candidate runs the whole call: later tokens must not change earlier results.
    """

    elements: int
    """Elements of the states, summed over tokens. They determine the time on a CPU, and the memory of a backward pass."""
    tokens: int
    """Tokens, summed over sequences. They determine the time on a GPU: each token is a few small launches."""


CHECKED = {"fwd": OracleLimit(1 << 27, 1 << 40), "fwdbwd": OracleLimit(1 << 23, 1 << 40), "decode": OracleLimit(1 << 40, 1 << 40)}
"""Limits on a CPU by mode: about one second."""
CHECKED_ON_GPU = {"fwd": OracleLimit(1 << 31, 1 << 13), "fwdbwd": OracleLimit(1 << 29, 1 << 11), "decode": OracleLimit(1 << 40, 1 << 40)}
"""Limits on a GPU by mode: a few seconds. The backward pass of the oracle keeps up to 50 bytes for an element and token, 27 GB."""


class WrongResult(PenstockError, RuntimeError):
    """The error of a candidate's result exceeds its budget. The candidate is not timed."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"bench: {what}: {detail}.")
        self.detail = detail
        """The result, its error and the allowed error."""


class Deviation(NamedTuple):
    """Error of one result against the oracle, and the allowed error."""

    error: float
    allowed: float


def checked_tokens(shape: Shape, mode: Mode, device: torch.device) -> int:
    """How many tokens of each sequence the oracle computes in about one second."""
    elements, tokens = (CHECKED_ON_GPU if on_gpu(device) else CHECKED)[mode]
    return max(1, min(shape.T, elements // prod(shape.state), tokens // shape.B))


@dataclass
class Exact:
    """The exact results of one call, by name."""

    inputs: Inputs
    mode: Mode
    tokens: int
    """Checked tokens of each sequence."""
    results: dict[str, Tensor]
    rounded: dict[int, dict[str, float]] = field(default_factory=dict)
    """Error of each result from operands rounded to this many bits. Computed when a candidate needs it."""

    @classmethod
    def of(cls, inputs: Inputs, mode: Mode) -> Exact:
        """Compute the exact results."""
        tokens = checked_tokens(inputs.shape, mode, inputs.q.device)
        if mode == "decode":
            state = states(inputs)
            output, rows = oracle.exact_forward(inputs, state if inputs.slots is None else state[inputs.slots])
            results = {"output": output, "states": rows if inputs.slots is None else state.double().index_copy(0, inputs.slots, rows)}
        elif mode == "fwd":
            results = {"output": oracle.exact_forward(inputs.first(tokens))[0]}
        else:
            results = oracle.by_result(oracle.exact_gradients(inputs.first(tokens), d_output(inputs)[:, :tokens]))
        return cls(inputs, mode, tokens, results)

    def compare(self, candidate: Candidate) -> tuple[dict[str, Deviation], float]:
        """Errors of a candidate's first call by result, and its seconds. Raises WrongResult if an error exceeds its budget."""
        with using_threads(candidate.threads):
            found, seconds = self._first_call(candidate)
        deviations = {}
        for name, value in found.items():
            exact = self.results[name]
            if value.shape != exact.shape:  # a gradient of all tokens: those after the checked ones are 0
                whole = exact.new_zeros(value.shape)
                whole[:, : self.tokens] = exact
                exact = whole
            deviations[name] = Deviation(oracle.error(value, exact), self._allowed(candidate, name, value.dtype))
            if not deviations[name].error <= deviations[name].allowed:
                detail = f"is {deviations[name].error:.2g} from the float64 token loop, {deviations[name].allowed:.2g} is allowed"
                raise self._wrong(candidate, f"its {name} {detail if bool(value.isfinite().all()) else NOT_FINITE}")
        return deviations, seconds

    def _wrong(self, candidate: Candidate, detail: str) -> WrongResult:
        x = self.inputs
        what = f"{candidate.name} is wrong and was not timed: {x.variant} at {x.shape.text}, {self.mode}, {x.q.dtype} on {x.q.device}"
        return WrongResult(what, detail)

    def _first_call(self, candidate: Candidate) -> tuple[dict[str, Tensor], float]:
        """Results by name, cut to the checked tokens, and seconds, including compilation and autotuning."""
        x, device = self.inputs, self.inputs.q.device
        given = candidate.arguments(x)
        if self.mode == "decode":
            state = candidate.states(states(x))
            with torch.no_grad():
                seconds, (output, after) = seconds_of(lambda: candidate.step(given, state), device)
            return {"output": output, "states": after.mT if candidate.values_first else after}, seconds
        if self.mode == "fwd":
            with torch.no_grad():
                seconds, output = seconds_of(lambda: candidate.forward(given), device)
            if not bool(output[:, self.tokens :].isfinite().all()):
                raise self._wrong(candidate, f"its output after token {self.tokens} {NOT_FINITE}")
            return {"output": output[:, : self.tokens]}, seconds
        leaves, upstream = given.with_gradients(), d_output(x)
        upstream[:, self.tokens :] = 0
        seconds, (_, *gradients) = seconds_of(lambda: output_and_gradients(candidate, leaves, upstream), device)
        return oracle.by_result(candidate.gradients(x, dict(zip(leaves.trained, gradients)))), seconds

    def _allowed(self, candidate: Candidate, name: str, dtype: torch.dtype) -> float:
        """The candidate's budget and, if its products round their operands, twice the error of that rounding."""
        allowed = oracle.growth(self.tokens) * candidate.budget(self.inputs.q.dtype, dtype)
        bits = candidate.operand_bits
        if bits is None:
            return allowed
        if bits not in self.rounded:
            first = self.inputs.first(self.tokens)
            upstream = (d_output(self.inputs)[:, : self.tokens], None) if self.mode == "fwdbwd" else ()
            self.rounded[bits] = rounding.errors(first.problem(), bits, self.results, upstream)
        return allowed + 2 * self.rounded[bits].get(name, 0.0)
