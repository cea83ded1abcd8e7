"""From logits to a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Complaints, DeviceError, DtypeError, RangeError, described


def check_sampling(
    complaints: Complaints, temperature: float, top_p: float, generator: torch.Generator | None, device: torch.device
) -> None:
    """Numbers, temperature >= 0 and 0 < top_p <= 1; a generator for this kind of device."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            complaints.add(DtypeError, name, "a number", described(value))
        elif name == "temperature" and not value >= 0:
            complaints.add(RangeError, name, "at least 0", value, "0 takes the likeliest token.")
        elif name == "top_p" and not 0 < value <= 1:
            complaints.add(RangeError, name, "above 0 and at most 1", value, "1 leaves no token out.")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        complaints.add(DtypeError, "generator", "a torch.Generator or None", described(generator))
    elif generator.device.type != device.type:
        remedy = f"Make it with torch.Generator({device.type!r})."
        complaints.add(DeviceError, "generator", f"for {device}, where the model is", generator.device, remedy)


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row of logits [N,vocab_size]: int64 [N].

    p = softmax(logits / temperature), cut to its *nucleus*: the fewest likeliest tokens whose p sums to ``top_p`` or
    more. Temperature 0 takes the likeliest token.

    Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.

    >>> draw(torch.tensor([[0.0, 3.0, 1.0]]), temperature=1.0, top_p=0.5)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    p, tokens = torch.softmax(logits.float() / temperature, -1).sort(-1, descending=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0)
    return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)
