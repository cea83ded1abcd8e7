"""What passes over the same tokens share, as those of context parallelism do: tiles that depend on no states."""

import torch
from deltas import Delta

from penstock.call.implementation import Upstream
from penstock.delta.operators import DELTA
from penstock.delta.slices import _unwritten
from penstock.gpu import sharing


def given(case, device):
    tensors = case.tensors(device)
    return [tensors[name] for name in DELTA.names]


def forward(case, tensors):
    return DELTA(case.variant, tensors, case.options, "triton_chunkwise")


def backward(case, tensors, wanted, device):
    upstream = Upstream(case.upstream(device), (), (), wanted)
    return DELTA.backward(case.variant, tensors, case.options, "triton_chunkwise", upstream)


def tiles():
    return {id(x) for _, written in sharing.kept().values() for x in written}


def check_shared_tiles(case: Delta, own_values: bool, device: str = "cpu"):
    """Passes take the tiles of summaries, and have the bits of passes alone.

    ``own_values``: whether tiles depend on values. Then the summary without values has tiles of its own.
    """
    x, every = given(case, device), [True] * len(DELTA.names)
    alone = [False] * (len(every) - 1) + [True]
    with torch.no_grad():
        wanted, of_inputs = forward(case, x), backward(case, x, every, device)
        with sharing.shared():
            DELTA(case.variant, (*x[:-1], None), case.options, "triton_chunkwise")
            first = tiles()
            assert first
            DELTA(case.variant, _unwritten(x[:-1]), case.options, "triton_chunkwise")
            both = tiles()
            assert (both != first) == own_values
            found = forward(case, x)
            assert tiles() == both
        with sharing.shared():
            state = backward(case, x, alone, device)
            first = tiles()
            assert first
            assert [one is not None for one in state] == alone
            gradients = backward(case, x, every, device)
            assert tiles() == first or (case.row.streams == 2 and not tiles())  # a pass that writes there takes them for good
            again = forward(case, x), backward(case, x, every, device)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))
    assert all(torch.equal(*pair) for pair in zip(again[0], wanted))
    for one, other in zip(again[1], of_inputs):
        assert one is other is None or torch.equal(one, other)
    assert torch.equal(state[-1], of_inputs[-1])
    for one, other in zip(gradients, of_inputs):
        assert one is other is None or torch.equal(one, other)
