"""Calls of the native library: memory, and threads that have none."""

import ctypes

import pytest
import torch

from penstock import cpu
from penstock.cpu import openmp
from penstock.delta import cpu as delta
from penstock.errors import PenstockError
from penstock.layers.cpu import decode, rwkv7
from penstock.layers.cpu import linear as products
from penstock.recurrence import cpu as recurrence

pytestmark = pytest.mark.skipif(cpu.unavailable("forward") is not None, reason="the native library is not built")
HUGE = 2**46
"""A size whose scratch no machine has."""
SIZES = {"N": 0, "H": 1, "K": HUGE, "V": 16}
CALLS = {
    "forward": lambda: recurrence._Call(**SIZES),
    "backward": lambda: recurrence._Call(**SIZES),
    "delta_forward": lambda: delta._Call(**SIZES, group=1),
    "delta_backward": lambda: delta._Call(**SIZES, group=1),
    "rwkv_step": lambda: decode._Step(R=0, H=1, K=HUGE, V=16),
    "rwkv7_step": lambda: rwkv7._Step(R=0, H=1, N=2**25),
    "shifted_norm": lambda: decode._Shift(R=0, C=HUGE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_memory_raises(name):
    """Before anything is computed or written."""
    with pytest.raises(PenstockError, match=f"cpu: no memory left for the scratch of the {name} pass"):
        cpu.run(name, CALLS[name](), 1)


@pytest.mark.parametrize("working", [1, 2, 3])
def test_threads_without_memory_leave_their_work_to_others(working, monkeypatch):
    """A team of fewer threads than asked for computes the same."""
    x, weight = torch.randn(3, 300), torch.randn(1000, 300)
    wanted, ran = products.linear(x, weight), []

    def region(function, pointer, threads):
        ran.append(threads)
        for _ in range(working):
            function(pointer)

    monkeypatch.setattr(openmp, "parallel", lambda: region)
    monkeypatch.setattr(cpu, "THREAD_WORK", 1)
    assert torch.equal(products.linear(x, weight), wanted)
    assert ran == [torch.get_num_threads()]
    monkeypatch.setattr(openmp, "parallel", lambda: lambda function, pointer, threads: None)
    with pytest.raises(PenstockError, match="cpu: no memory left for the scratch of the products pass"):
        products.linear(x, weight)


def test_structs_end_with_the_fields_of_a_team():
    for one in (recurrence._Call, delta._Call, decode._Step, decode._Shift, rwkv7._Step, products._Products):
        assert one.next.offset + one.next.size == ctypes.sizeof(one)
