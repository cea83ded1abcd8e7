"""Every model over the ranks of a process group."""

import pytest
from architectures import ARCHITECTURES
from ranks import spawned
from sampling import slow
from slices import averaged_alike, cuts, models_alike


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [(3, 1), *slow((2, 6), (4, 6))])
def test_ranks_equal_one_process(sizes):
    """With one cut for each model, all have different ones."""
    ranks, each = sizes
    every = cuts(ranks, each * len(ARCHITECTURES))
    spawned(models_alike, ranks, [(name, cut) for n, name in enumerate(ARCHITECTURES) for cut in every[n * each : (n + 1) * each]])


@pytest.mark.parametrize("name", ["rwkv6", *slow("hybrid", "mamba2")])
def test_averaged_gradients(name):
    spawned(averaged_alike, 4, name)
