"""Tokens for tests of models."""

import pytest
import torch
from architectures import SIZES


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """[2,40] of the vocabulary of small models."""
    return torch.randint(SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(2))
