"""Results of ``penstock check``."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = "layers"
"""What findings of chains of layers have as their variant."""


@dataclass(frozen=True)
class Finding:
    """One result of one implementation, or its refusal."""

    implementation: str
    """Or the name of a chain of layers."""
    device: str
    variant: str
    dtype: str
    result: str
    """"output", "final state", "gradient of q", ..., "decode output", "decode states"."""
    error: float | None
    """Largest difference from the oracle, relative to its largest value; None if the implementation did not run."""
    budget: float | None
    reason: str | None = None
    """Why it did not run: a refusal, or an exception, which is a failure."""
    failed: bool = False
    form: str = ""
    """The form of the implementation, where it was compared alone."""
    absent: bool = False
    """Whether it cannot run on this machine at all."""
