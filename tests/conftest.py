"""Fixtures."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread a test process, so that processes side by side do not fight for cores. Tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
