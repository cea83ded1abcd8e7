"""What ``penstock check`` finds out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One result of one implementation, or its refusal."""

    implementation: str
    device: str
    variant: str
    dtype: str
    result: str
    """"output", "final state", "gradient of q", ..., "decode output", "decode states"."""
    error: float | None
    """Largest difference from the oracle over its largest value; None if the implementation did not run."""
    budget: float | None
    reason: str | None = None
    """Why it did not run: a refusal, which is no fault, or an exception, which is one."""
    failed: bool = False
    absent: bool = False
    """Whether it does not run because nothing on this machine could run it."""
