"""What is right for one call in one mode, asked of the oracle once, and every candidate held to it before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PenstockError
from ..verify import oracle, rounding
from ..verify.inputs import Inputs, Shape
from ..verify.machine import using_threads
from .calls import d_output, output_and_gradients, states
from .candidates import Candidate, Mode
from .clock import on_gpu, seconds_of


class Reach(NamedTuple):
    """How far the oracle walks.

    Longer calls are checked on their first tokens, while the candidate runs the whole call: what comes later must not change them.
    """

    elements: int
    """Of the states, summed over tokens. On a CPU they take the time; backward, autograd keeps them."""
    tokens: int
    """Summed over sequences. On a GPU each is a few small launches, which take the time."""


CHECKED = {"fwd": Reach(1 << 27, 1 << 40), "fwdbwd": Reach(1 << 23, 1 << 40), "decode": Reach(1 << 40, 1 << 40)}
"""By mode, on a CPU: about a second."""
CHECKED_ON_GPU = {"fwd": Reach(1 << 31, 1 << 13), "fwdbwd": Reach(1 << 28, 1 << 11), "decode": Reach(1 << 40, 1 << 40)}
"""By mode, on a GPU: as long, for all candidates together."""


class WrongResult(PenstockError, RuntimeError):
    """A candidate's result is further from the oracle than its budget allows. It is not timed."""

    def __init__(self, what: str, told: str) -> None:
        super().__init__(f"bench: {what}: {told}.")
        self.told = told
        """Which result, how far, and how far it may be."""


class Apart(NamedTuple):
    """How far one result is from the oracle's."""

    error: float
    allowed: float


def checked_tokens(shape: Shape, mode: Mode, device: torch.device) -> int:
    """How many tokens of each sequence the oracle can walk in about a second."""
    elements, tokens = (CHECKED_ON_GPU if on_gpu(device) else CHECKED)[mode]
    return max(1, min(shape.T, elements // prod(shape.state), tokens // shape.B))


@dataclass
class Exact:
    """The exact results of one call, by name."""

    inputs: Inputs
    mode: Mode
    tokens: int
    """How many of each sequence are checked."""
    results: dict[str, Tensor]
    rounded: dict[int, dict[str, float]] = field(default_factory=dict)
    """What rounding operands to so many bits costs each result; filled as candidates ask for it."""

    @classmethod
    def of(cls, inputs: Inputs, mode: Mode) -> Exact:
        """Ask the oracle."""
        tokens = checked_tokens(inputs.shape, mode, inputs.q.device)
        if mode == "decode":
            results = dict(zip(("output", "states"), oracle.exact_forward(inputs, states(inputs))))
        elif mode == "fwd":
            results = {"output": oracle.exact_forward(inputs.first(tokens))[0]}
        else:
            results = oracle.by_result(oracle.exact_gradients(inputs.first(tokens), d_output(inputs)[:, :tokens]))
        return cls(inputs, mode, tokens, results)

    def hold(self, candidate: Candidate) -> tuple[dict[str, Apart], float]:
        """Errors of a candidate's first call by result, and the seconds it took. Raises WrongResult if one is beyond its budget."""
        with using_threads(candidate.threads):
            found, seconds = self._first_call(candidate)
        apart = {}
        for name, value in found.items():
            exact = self.results[name]
            if value.shape != exact.shape:  # a gradient of the whole call: none comes from tokens after the checked ones
                whole = exact.new_zeros(value.shape)
                whole[:, : self.tokens] = exact
                exact = whole
            apart[name] = Apart(oracle.error(value, exact), self._allowed(candidate, name, value.dtype))
            if not apart[name].error <= apart[name].allowed:
                x = self.inputs
                raise WrongResult(
                    f"{candidate.name} is wrong and was not timed: {x.variant} at {x.shape.text}, {self.mode}, {x.q.dtype} on {x.q.device}",
                    f"its {name} is {apart[name].error:.2g} from the float64 token loop, {apart[name].allowed:.2g} is allowed",
                )
        return apart, seconds

    def _first_call(self, candidate: Candidate) -> tuple[dict[str, Tensor], float]:
        """Results by name, cut to what is checked, and seconds, which include compiling and tuning."""
        x, device = self.inputs, self.inputs.q.device
        if self.mode == "decode":
            state = states(x)
            with torch.no_grad():
                seconds, stepped = seconds_of(lambda: candidate.step(x, state), device)
            return dict(zip(("output", "states"), stepped)), seconds
        if self.mode == "fwd":
            with torch.no_grad():
                seconds, output = seconds_of(lambda: candidate.forward(x), device)
            return {"output": output[:, : self.tokens]}, seconds
        leaves, upstream = x.with_gradients(), d_output(x)
        upstream[:, self.tokens :] = 0
        seconds, (_, *gradients) = seconds_of(lambda: output_and_gradients(candidate, leaves, upstream), device)
        return oracle.by_result(dict(zip(x.trained, gradients))), seconds

    def _allowed(self, candidate: Candidate, name: str, dtype: torch.dtype) -> float:
        """The candidate's budget and, if its products round their operands, twice what that costs the formula."""
        allowed = oracle.growth(self.tokens) * candidate.budget(self.inputs.q.dtype, dtype)
        bits = candidate.operand_bits
        if bits is None:
            return allowed
        if bits not in self.rounded:
            first = self.inputs.first(self.tokens)
            upstream = (d_output(self.inputs)[:, : self.tokens], None) if self.mode == "fwdbwd" else ()
            self.rounded[bits] = rounding.errors(first.problem(), bits, self.results, upstream)
        return allowed + 2 * self.rounded[bits].get(name, 0.0)
