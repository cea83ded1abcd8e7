"""Profiles of a call: every candidate checked and timed as ``penstock bench`` does it, then run once more under torch.profiler.

End-to-end times come from the clocks, without the profiler, whose own work would be most of a short call; kernels, launches and
conversions come from its traces.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import Complaints, DeviceError
from ..recurrence.operators import FAMILY
from ..verify.inputs import Inputs
from . import clock, fla, trace
from .calls import call_of
from .candidates import ASKED, Candidate, Mode, ours, problem_of
from .measure import Measurement, Untimed, measure
from .peers import PEERS, peer

MODES: tuple[Mode, ...] = ("fwd", "fwdbwd")


def candidates(inputs: Inputs, mode: Mode, impls: Sequence[str], named: Sequence[str]) -> tuple[list[Candidate], list[Untimed]]:
    """Implementations and peers of these names, peers first; of all names where none is given, and why some do not take the call."""
    refused: dict[str, str] = {}
    if not impls:
        problem = problem_of(inputs, mode)
        for one in FAMILY.implementations:
            reasons = [reason for asked in ASKED[mode] if (reason := one.refusal(problem, asked)) is not None]
            refused |= {one.name: reasons[0]} if reasons else {}
        impls = [one.name for one in FAMILY.implementations if one.name not in refused]
    if not named:
        reason = fla.unavailable(inputs.q.device) or fla.refusal(inputs)
        refused |= {name: reason for name in PEERS if name.startswith("fla") and reason is not None}
        named = [name for name in PEERS if name not in refused]
    taken = [peer(name, inputs, mode) for name in dict.fromkeys(named) if name != "none"]
    taken += [ours(name, inputs, mode) for name in dict.fromkeys(impls)]
    return taken, [Untimed(name, f"refuses: {reason}", False) for name, reason in refused.items()]


def hidden(inputs: Inputs) -> Inputs:
    """The same values as a model of Hugging Face has them: q, k, v and decays are views of [B,T,H*n], which their projections wrote."""
    B, T = inputs.q.shape[:2]
    made = {name: x.reshape(B, T, -1).clone().view(x.shape) if x.ndim == 4 else x for name, x in inputs.tensors.items()}
    return Inputs(inputs.variant, made["q"], made["k"], made["v"], made.get("g"), made.get("u"))


def trace_folder(candidate: str) -> str:
    """Name of the folder that gets the trace of a candidate."""
    return re.sub(r"\W+", "_", candidate).strip("_")


def profiled(case: str, inputs: Inputs, mode: Mode, of: Sequence[Candidate], folder: Path, seconds: float, steps: int) -> Measurement:
    """Check and time the candidates for about ``seconds`` each, then profile ``steps`` calls of each; traces go to ``folder``.

    Every candidate has a folder of its own there, named after it, as TensorBoard wants it. A wrong candidate is not run again.
    """
    found, device = measure(case, inputs, mode, list(of), seconds, keep_going=True), inputs.q.device
    by_name = {one.name: one for one in of}
    timings = []
    for timing in found.timings:
        name = trace_folder(timing.candidate)
        path = folder / name / f"{name}.{time.time_ns()}.pt.trace.json"
        with clock.current(device):
            trace.record(call_of(by_name[timing.candidate], inputs, mode), device, steps, path)
        seen = trace.read(path, clock.on_gpu(device))
        if seen is None:
            complaints = Complaints("profile")
            rule, remedy = "one whose work torch.profiler sees", "Let this process use the GPU's performance counters (CUPTI)."
            complaints.add(DeviceError, "device", rule, f"{device}, without a kernel in {path}", remedy)
            complaints.raise_any()
        timings.append(replace(timing, profile=seen))
    return replace(found, timings=tuple(timings))
