"""The matrices of levels."""

import pytest
import torch

from penstock.gpu import dyadic as plain
from penstock.gpu.levels import levels, penstock_levels
from penstock.gpu.target import interpreting


@pytest.mark.parametrize("low", [0, 16])
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_one_launch_makes_all_matrices(C, previous, low):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = plain.levels(C, previous, low, device)
    if interpreting():
        found = torch.full_like(wanted, torch.nan)
        penstock_levels[(len(found),)](found, C=C, LEVELS=len(plain.lengths(C, low)), PREVIOUS=previous, LOW=low)
    else:
        found = levels(C, previous, low, device)
    assert found.shape == wanted.shape == levels(C, previous, low, torch.device("meta")).shape
    assert torch.equal(found, wanted)
