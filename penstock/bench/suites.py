"""Suites: lists of cases with their own default options."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Complaints, RangeError
from .candidates import Mode
from .cases import DELTA_GATES, DELTA_GATES_CPU, GATED, GPU_DECODING, GPU_TRAINING, LENGTHS, SOFTMAX, Case, case_named
from .ladder import RUNGS


@dataclass(frozen=True)
class Suite:
    """Cases, and the defaults of the options of ``penstock bench``."""

    name: str
    summary: str
    cases: tuple[Case, ...]
    modes: tuple[Mode, ...]
    impls: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ("fla",)
    dtype: str = "bfloat16"
    device: str = "cuda"
    seconds: float = 0.4
    """Time for each candidate on each case, end to end and again for its GPU time."""


PLAIN = Suite("", "", (), ("fwd",), peers=("loop",), dtype="float32", device="cpu", seconds=1.0)
"""The defaults without a suite."""

LADDER = "wkv-ladder"

SUITES = (
    Suite("gpu-training", "sequences and prompts, beside fla; most of the time is fla's autotuning", GPU_TRAINING, ("fwd", "fwdbwd")),
    Suite("gates", "weak to strong decays per channel, beside fla", GATED, ("fwd", "fwdbwd"), seconds=0.1),
    Suite("gpu-decode", "one token for 1 to 1024 sequences, beside fla", GPU_DECODING, ("decode",), peers=("fla", "flash_rwkv")),
    Suite(
        "delta-gates",
        "the delta rule from no decays to the strongest, beside other projects",
        DELTA_GATES,
        ("fwd", "fwdbwd"),
        ("auto", "raw"),
        ("fla", "fla_bounded", "flash_kda", "cudnn", "flash_qla", "flash_rwkv"),
        seconds=0.1,
    ),
    Suite(
        "delta-gates-cpu",
        "the same on a CPU, beside the token loop",
        DELTA_GATES_CPU,
        ("fwd", "fwdbwd"),
        peers=("loop",),
        dtype="float32",
        device="cpu",
    ),
    Suite(
        "lengths", "chunked and token-by-token kernels as T grows", LENGTHS, ("fwd",), ("triton_recurrent", "triton_chunkwise"), ("none",)
    ),
    Suite("softmax", "softmax attention beside torch's backends", SOFTMAX, ("fwd", "fwdbwd"), peers=("sdpa",)),
    Suite(
        LADDER,
        "CUDA kernels from a literal one to the cuda implementation",
        (case_named("rwkv6-profile"), LENGTHS[0]),
        ("fwd",),
        ("cuda",),
        tuple(RUNGS),
        "float32",
    ),
)


def suite_named(name: str) -> Suite:
    """The suite of this name. Raises RangeError if there is none."""
    found = [suite for suite in SUITES if suite.name == name]
    if not found:
        complaints = Complaints("bench")
        complaints.add(RangeError, "suite", f"one of {', '.join(suite.name for suite in SUITES)}", repr(name), "See penstock bench --list.")
        complaints.raise_any()
    return found[0]
