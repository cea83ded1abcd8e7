"""What one command measures: cases, with the questions that are usually asked of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Complaints, RangeError
from .candidates import Mode
from .cases import GPU_DECODING, GPU_TRAINING, LENGTHS, SOFTMAX, Case, case_named
from .ladder import RUNGS


@dataclass(frozen=True)
class Suite:
    """Cases, and what ``penstock bench`` takes for every option that is not given."""

    name: str
    summary: str
    cases: tuple[Case, ...]
    modes: tuple[Mode, ...]
    impls: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ("fla",)
    dtype: str = "bfloat16"
    device: str = "cuda"
    seconds: float = 0.4
    """For each candidate on each case, and once more for its GPU time alone."""


PLAIN = Suite("", "", (), ("fwd",), peers=("loop",), dtype="float32", device="cpu", seconds=1.0)
"""Without a suite: cases are named one by one."""

LADDER = "wkv-ladder"

SUITES = (
    Suite("gpu-training", "sequences and prompts, beside fla, whose tuning takes most of the time", GPU_TRAINING, ("fwd", "fwdbwd")),
    Suite("gpu-decode", "one token for 1, 256 and 1024 sequences, beside fla", GPU_DECODING, ("decode",)),
    Suite("lengths", "chunked against token by token as T grows", LENGTHS, ("fwd",), ("triton_recurrent", "triton_chunkwise"), ("none",)),
    Suite("softmax", "softmax attention beside torch's backends", SOFTMAX, ("fwd", "fwdbwd"), peers=("sdpa",)),
    Suite(
        LADDER,
        "from a naive CUDA kernel to ours, rung by rung",
        (case_named("rwkv6-profile"), LENGTHS[0]),
        ("fwd",),
        ("cuda",),
        tuple(RUNGS),
        "float32",
    ),
)


def suite_named(name: str) -> Suite:
    """Find the suite of this name, or raise RangeError."""
    found = [suite for suite in SUITES if suite.name == name]
    if not found:
        complaints = Complaints("bench")
        complaints.add(RangeError, "suite", f"one of {', '.join(suite.name for suite in SUITES)}", repr(name), "See penstock bench --list.")
        complaints.raise_any()
    return found[0]
