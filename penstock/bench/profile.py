"""Profiles of a call: every candidate is checked and timed as in ``penstock bench``, then run once more under torch.profiler.

End-to-end times are measured without the profiler, because its overhead dominates a short call. Kernels, launches and layout conversions
are counted from its traces.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import Complaints, DeviceError
from ..verify.inputs import Inputs
from . import clock, fla, raw, trace
from .calls import call_of
from .candidates import IMPLEMENTATION_MODES, Candidate, Mode, problem_of
from .measure import Measurement, Untimed, measure
from .peers import PEERS, peer

MODES: tuple[Mode, ...] = ("fwd", "fwdbwd")


def candidates(inputs: Inputs, mode: Mode, impls: Sequence[str], named: Sequence[str]) -> tuple[list[Candidate], list[Untimed]]:
    """The named peers and implementations, peers first; by default all that take the call. Also lists those that refuse it."""
    refused: dict[str, str] = {}
    implementations = inputs.family.family.implementations
    if not impls:
        problem = problem_of(inputs, mode)
        for one in implementations:
            reasons = [reason for run_mode in IMPLEMENTATION_MODES[mode] if (reason := one.refusal(problem, run_mode)) is not None]
            refused |= {one.name: reasons[0]} if reasons else {}
        impls = [one.name for one in implementations if one.name not in refused]
    if not named:
        reason = fla.unavailable(inputs.q.device) or fla.refusal(inputs)
        refused |= {name: reason for name in PEERS if name.startswith("fla") and reason is not None}
        named = [name for name in PEERS if name not in refused]
    taken = [peer(name, inputs, mode) for name in dict.fromkeys(named) if name != "none"]
    taken += [raw.own(name, inputs, mode) for name in dict.fromkeys(impls)]
    return taken, [Untimed(name, f"refuses: {reason}", False) for name, reason in refused.items()]


def hidden(inputs: Inputs) -> Inputs:
    """The same values in the layout of a Hugging Face model: q, k, v and decays are views of [B,T,H*n], the output of projections."""
    B, T = inputs.q.shape[:2]
    made = {name: x.reshape(B, T, -1).clone().view(x.shape) if x.ndim == 4 else x for name, x in inputs.tensors.items()}
    return Inputs.of(inputs.variant, made)


def trace_folder(candidate: str) -> str:
    """Name of the folder that gets the trace of a candidate."""
    return re.sub(r"\W+", "_", candidate).strip("_")


def profiled(case: str, inputs: Inputs, mode: Mode, chosen: Sequence[Candidate], folder: Path, seconds: float, steps: int) -> Measurement:
    """Check and time the candidates for about ``seconds`` each, then profile ``steps`` calls of each; traces go to ``folder``.

    Each candidate gets a folder, which TensorBoard shows as a run. A wrong candidate is not profiled.
    """
    found, device = measure(case, inputs, mode, list(chosen), seconds, keep_going=True), inputs.q.device
    by_name = {one.name: one for one in chosen}
    timings = []
    for timing in found.timings:
        name = trace_folder(timing.candidate)
        path = folder / name / f"{name}.{time.time_ns()}.pt.trace.json"
        with clock.current(device):
            trace.record(call_of(by_name[timing.candidate], inputs, mode), device, steps, path)
        seen = trace.read(path, clock.on_gpu(device))
        if seen is None:
            complaints = Complaints("profile")
            rule, remedy = "one whose kernels torch.profiler sees", "Allow this process to use the GPU's performance counters (CUPTI)."
            complaints.add(DeviceError, "device", rule, f"{device}, without a kernel in {path}", remedy)
            complaints.raise_any()
        timings.append(replace(timing, profile=seen))
    return replace(found, timings=tuple(timings))
