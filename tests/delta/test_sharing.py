"""What passes over the same tokens share: tiles that depend on no states, raw inputs, repeated heads."""

from dataclasses import replace

import pytest
import torch
from deltas import Delta
from sampling import slow
from shares import check_shared_tiles

from penstock.delta.triton import launch
from penstock.gpu import sharing

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
OF = Delta("kda", B=1, T=66, H=2, K=4, V=4, raw=True)
TWO_STREAMS = replace(OF, variant="rwkv7", raw=False)
CASES = [replace(OF, G=1), TWO_STREAMS, *slow(OF, replace(OF, variant="gated_delta_rule", G=1))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_take_the_tiles_of_summaries(case, monkeypatch):
    """The stage of raw inputs runs as often for all passes of a block as for one: once forward, once backward, which computes it again.

    In the second block both kinds of passes run.
    """
    runs = []
    for stage in (launch.raw_forward, launch.raw_differentiable):
        monkeypatch.setattr(launch, stage.__name__, lambda *given, stage=stage: runs.append(stage.__name__) or stage(*given))
    check_shared_tiles(case, False)
    assert runs == (["raw_forward", "raw_differentiable", "raw_forward"] * 2 + ["raw_forward"]) * case.raw


def test_once():
    x, y, runs = torch.zeros(1), torch.zeros(1), []

    def made(key, *read):
        return sharing.once(key, read, lambda: runs.append(1) or object())

    assert made("a", x) is not made("a", x)
    with sharing.shared():
        assert made("a", x) is made("a", x) is not made("a", y)
        assert made("b", x) is not made("a", x)
        outside = made("a", x)
        with sharing.shared():
            assert made("a", x) is not outside
        assert made("a", x) is outside
    assert made("a", x) is not outside
