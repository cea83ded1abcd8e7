"""Models whose decays are as strong or as weak as parameters can make them: finite losses and gradients."""

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of

DECAYS = ("time_decay", "A_log", "dt_bias", "gk_proj", "w0", "f_proj", "a_proj")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_finite(name: str) -> None:
    """An exponential of 150 is infinite in float32, and a decay of exp(-exp(150)) is 0."""
    ids = torch.randint(SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(0))
    names = [one for one, _ in model_of(name, torch.float32).named_parameters() if any(part in one for part in DECAYS)]
    for parameter in names:
        for value in (150.0, -150.0):
            model = model_of(name, torch.float32)
            with torch.no_grad():
                model.get_parameter(parameter).fill_(value)
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            loss.backward()
            wrong = [one for one, x in model.named_parameters() if x.grad is not None and not x.grad.isfinite().all()]
            assert loss.isfinite(), (parameter, value)
            assert not wrong, (parameter, value)
