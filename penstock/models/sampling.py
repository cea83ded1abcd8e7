"""Sampling: from logits to a token."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..call.private import is_fake
from ..call.validation import reads_values
from ..errors import Complaints, DeviceError, DtypeError, RangeError, described, shortened
from .probabilities import COLDEST, HOTTEST, at_random, limits, ranks_of, weights, whole


def check_sampling(
    complaints: Complaints, temperature: float, top_p: float, generator: torch.Generator | None, device: torch.device
) -> None:
    """Check that temperature is finite and at least 0, that 0 < top_p <= 1, and that the generator is on this type of device."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            complaints.add(DtypeError, name, "a number", described(value))
        elif name == "temperature" and not 0 <= value <= sys.float_info.max:  # works for integers of any size
            complaints.add(RangeError, name, "a finite number of at least 0", shortened(value), "0 takes the most likely token.")
        elif name == "top_p" and not 0 < value <= 1:
            complaints.add(RangeError, name, "above 0 and at most 1", shortened(value), "1 keeps every token.")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        complaints.add(DtypeError, "generator", "a torch.Generator or None", described(generator))
    elif generator.device.type != device.type:
        remedy = f"Make it with torch.Generator({device.type!r})."
        complaints.add(DeviceError, "generator", f"for {device}, where the model is", generator.device, remedy)


def check_logits(function: str, logits: Tensor, last: bool = False, name: str = "logits") -> None:
    """Raise RangeError for NaN. The ``last`` logits are checked on every device, others where that does not wait for it.

    A NaN stays in the state of its sequence, so the last logits show it.
    """
    if (reads_values(logits) or (last and not is_fake(logits))) and bool(logits.isnan().any()):
        complaints = Complaints(function)
        remedy = "Weights are NaN, or values overflow: check the weights, and load the model as bfloat16 or float32."
        complaints.add(RangeError, name, "numbers", "NaN", remedy)
        complaints.raise_any()


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row of logits [N,vocab_size]: int64 [N].

    p = softmax(logits / temperature), cut to its *nucleus*: the smallest set of most likely tokens whose p sum to at least
    ``top_p``. Temperature 0 takes the most likely token. A row with NaN gives an arbitrary token.

    Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.

    >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), temperature=1.0, top_p=0.5)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    row = logits.new_full((1, 1), min(max(float(temperature), COLDEST), HOTTEST), dtype=torch.float64)
    found = weights(logits, logits.amax(-1, keepdim=True), row).nan_to_num_(1.0)
    if top_p < 1:
        ranks = ranks_of(found)
        least, _ = limits(ranks, torch.full_like(row, ranks.shape[1] - 1), torch.full_like(row, top_p))
        found = found.masked_fill_(ranks < least, 0)
    return at_random(whole(found), torch.rand(len(found), generator=generator, dtype=torch.float64, device=found.device))
