"""Fixtures."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread a test process, so that processes side by side do not fight for cores. Tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def at_full_speed(monkeypatch):
    """Without the implementations that only the interpreter runs here: test_triton.py holds those to the oracle."""
    from penstock.recurrence.operators import FAMILY

    fast = tuple(one for one in FAMILY.implementations if not one.name.startswith("triton"))
    monkeypatch.setattr(FAMILY, "implementations", fast)
