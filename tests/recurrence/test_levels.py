"""The matrices of levels."""

import pytest
import torch

from penstock.gpu.target import interpreting
from penstock.recurrence import levels as plain
from penstock.recurrence.triton.portable.levels import levels, penstock_levels


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_one_launch_makes_all_matrices(C, previous):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = plain.levels(C, previous, device)
    if interpreting():
        found = torch.full_like(wanted, torch.nan)
        penstock_levels[(len(found),)](found, C=C, LEVELS=len(plain.lengths(C)), PREVIOUS=previous)
    else:
        found = levels(C, previous, device)
    assert found.shape == wanted.shape == levels(C, previous, torch.device("meta")).shape
    assert torch.equal(found, wanted)
