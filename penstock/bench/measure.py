"""Timing: a candidate is held to the oracle first, then all candidates take turns, so that noise hits them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from statistics import median, quantiles

import torch
from torch import Tensor

from ..errors import Complaints, PenstockError, ShapeError
from ..problem import STEP_TOKENS, state_dtype
from . import oracle
from .candidates import Candidate, Mode
from .cases import Inputs, Shape
from .machine import using_threads

SAMPLE = 5e-4
"""Seconds that one sample lasts at least, by calling more than once: far above the resolution of any clock."""
SAMPLES = 3
"""Samples of a slow candidate, as long as they stay within three times its budget."""
CHECKED = {"fwd": 1 << 27, "fwdbwd": 1 << 23, "decode": 1 << 40}
"""State elements, summed over tokens, that the oracle walks through by mode: about a second. Longer calls are checked
on their first tokens, while the candidate runs the whole call: what comes later must not change them."""
EVEN_TOKENS = 1024
"""Checked tokens up to which a budget holds as it is; beyond, rounding errors grow with the square root."""


class WrongResult(PenstockError, RuntimeError):
    """A candidate's result is further from the oracle than its budget allows. It is not timed."""


@dataclass(frozen=True)
class Timing:
    """What one candidate took for one call."""

    candidate: str
    milliseconds: float
    """Median of the samples."""
    quartiles: tuple[float, float]
    """First and third, milliseconds."""
    samples: int
    error: float | None
    """Largest over the output, or the gradients, or output and states; None for the copy, which computes nothing."""
    threads: int
    """CPU threads it was given."""
    peak_bytes: int | None = None
    """Most memory taken beyond the inputs; on a GPU only."""


@dataclass(frozen=True)
class Measurement:
    """All candidates on one shape in one mode."""

    variant: str
    case: str
    shape: Shape
    mode: Mode
    dtype: str
    device: str
    checked_tokens: int
    """How many tokens of each sequence the oracle was asked about."""
    moved_bytes: int
    """The fewest bytes that can be moved: every input read once and every result written once."""
    copy: Timing
    """A plain copy that moves as many bytes, measured in turn with the candidates: the floor."""
    timings: tuple[Timing, ...]

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the copy moved."""
        return self.moved_bytes / (self.copy.milliseconds * 1e-3)


def measure(case: str, inputs: Inputs, mode: Mode, candidates: list[Candidate], seconds: float = 1.0) -> Measurement:
    """Check every candidate, then time them in turn for about ``seconds`` each. Raises WrongResult."""
    shape = inputs.shape
    if mode == "decode" and shape.T > STEP_TOKENS:
        complaints = Complaints("bench")
        complaints.add(
            ShapeError, "T", f"at most {STEP_TOKENS} in mode decode", shape.T, "Take T = 1, or a case whose name has -decode- in it."
        )
        complaints.raise_any()
    tokens = checked_tokens(shape, mode)
    errors = []
    for candidate in candidates:
        with using_threads(candidate.threads):
            errors.append(_checked(candidate, inputs, mode, tokens))
    moved = moved_bytes(inputs, mode)
    calls = [_call(candidate, inputs, mode) for candidate in candidates]
    peaks = [_peak(call, inputs.q.device) for call in calls]
    taken = in_turn([_copy(inputs, mode, moved), *calls], inputs.q.device, seconds)
    threads = torch.get_num_threads()
    copy, *timings = (
        Timing(name, median(samples), _quartiles(samples), len(samples), error, given or threads, peak)
        for (name, given), samples, error, peak in zip(
            [("copy", None), *((candidate.name, candidate.threads) for candidate in candidates)], taken, [None, *errors], [None, *peaks]
        )
    )
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    return Measurement(inputs.variant, case, shape, mode, dtype, str(inputs.q.device), tokens, moved, copy, tuple(timings))


def moved_bytes(inputs: Inputs, mode: Mode) -> int:
    """Count the bytes of reading every input once and writing every result once.

    Forward: q, k, v, g, u and the output. Backward, on top: all of these again (the output's gradient in the place of the
    output) and a gradient for every input. Decode: the states, read and written; its tokens are too few to count.
    """
    read = sum(x.numel() * x.element_size() for x in inputs.tensors.values())
    output = inputs.v.numel() * inputs.v.element_size()
    if mode == "decode":
        return 2 * prod(inputs.shape.state) * state_dtype(inputs.q.dtype).itemsize
    return read + output if mode == "fwd" else (read + output) + (read + output) + read


def checked_tokens(shape: Shape, mode: Mode) -> int:
    """How many tokens of each sequence the oracle can walk in about a second."""
    return max(1, min(shape.T, CHECKED[mode] // prod(shape.state)))


def _checked(candidate: Candidate, inputs: Inputs, mode: Mode, tokens: int) -> float:
    """Return the candidate's largest error, or raise WrongResult if one is beyond its budget."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    if mode == "decode":
        state = _state(inputs)
        output, states = oracle.exact_forward(inputs, state)
        with torch.no_grad():
            found = candidate.step(inputs, state)
        pairs = {"output": (found[0], output), "states": (found[1], states)}
    elif mode == "fwd":
        with torch.no_grad():
            pairs = {"output": (candidate.forward(inputs)[:, :tokens], oracle.exact_forward(inputs.first(tokens))[0])}
    else:
        d_output = _d_output(inputs)
        d_output[:, tokens:] = 0
        gradients = dict(zip(inputs.tensors, _gradients(candidate, inputs.with_gradients(), d_output)))
        for name, exact in oracle.exact_gradients(inputs.first(tokens), d_output[:, :tokens]).items():
            whole = exact.new_zeros(gradients[name].shape)  # no output after the checked tokens has a gradient
            (whole[:, :tokens] if whole.shape != exact.shape else whole).copy_(exact)
            pairs[f"gradient of {name}"] = (gradients[name], whole)
    growth = sqrt(max(1.0, tokens / EVEN_TOKENS))
    worst = 0.0
    for name, (value, exact) in pairs.items():
        apart, allowed = oracle.error(value, exact), growth * candidate.budget(inputs.q.dtype, value.dtype)
        if not apart <= allowed:
            raise WrongResult(
                f"bench: {candidate.name} is wrong and was not timed: {inputs.variant} at {inputs.shape.text}, {mode}, {inputs.q.dtype} on "
                f"{inputs.q.device}: its {name} is {apart:.2g} from the float64 token loop, {allowed:.2g} is allowed."
            )
        worst = max(worst, apart)
    return worst


def _call(candidate: Candidate, inputs: Inputs, mode: Mode) -> Callable[[], object]:
    """Make what is timed: one call, with everything it needs made beforehand."""
    if mode == "fwdbwd":
        leaves, d_output = inputs.with_gradients(), _d_output(inputs)

        def both() -> object:
            with using_threads(candidate.threads):
                return _gradients(candidate, leaves, d_output)

        return both

    if mode == "fwd":

        def forward() -> object:
            with torch.no_grad(), using_threads(candidate.threads):
                return candidate.forward(inputs)

        return forward

    state = _state(inputs)

    def step() -> object:
        nonlocal state
        with torch.no_grad(), using_threads(candidate.threads):
            output, state = candidate.step(inputs, state)
        return output

    return step


def _gradients(candidate: Candidate, leaves: Inputs, d_output: Tensor) -> tuple[Tensor, ...]:
    output = candidate.forward(leaves)
    return torch.autograd.grad(output, list(leaves.tensors.values()), d_output.to(output.dtype))


def _d_output(inputs: Inputs) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(inputs.v.shape, generator=random).to(inputs.v.device, inputs.v.dtype)


def _state(inputs: Inputs) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(inputs.shape.state, generator=random).to(inputs.q.device, state_dtype(inputs.q.dtype))


def _copy(inputs: Inputs, mode: Mode, moved: int) -> Callable[[], object]:
    """Move as many bytes as the floor counts: for decoding the states in place, else from one half to another."""
    if mode == "decode":
        state = _state(inputs)
        return lambda: state.mul_(1.0)
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=inputs.q.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def in_turn(calls: list[Callable[[], object]], device: torch.device, seconds: float) -> list[list[float]]:
    """Milliseconds of one call, sample by sample for each of ``calls``, which take turns; about ``seconds`` for each."""
    clock = _gpu_clock if device.type == "cuda" else _cpu_clock
    first = [clock(call, 1, device) for call in calls]
    counts = [1 if once > SAMPLE else max(1, round(SAMPLE / max(clock(call, 1, device), 1e-7))) for call, once in zip(calls, first)]
    samples = [[once * 1e3] if once > seconds else [] for once in first]  # one that takes so long is warm after its check
    spent = [sum(taken) * 1e-3 for taken in samples]
    while running := [n for n in range(len(calls)) if spent[n] < (seconds if len(samples[n]) >= SAMPLES else 3 * seconds)]:
        for n in running:
            taken = clock(calls[n], counts[n], device)
            spent[n] += taken
            samples[n].append(taken / counts[n] * 1e3)
    return samples


def _cpu_clock(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds for so many calls."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - begin


def _gpu_clock(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds between two events on the GPU around so many calls."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _peak(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that one call takes at most beyond what is there before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _quartiles(samples: list[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return first, third
