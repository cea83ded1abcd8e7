"""Every mixer over the ranks of a process group; calls that cannot be made."""

import passing
import pytest
import torch
from architectures import MIXERS
from ranks import spawned
from sampling import every, slow
from slices import C, mixers_alike, pairs_of_cuts

import penstock as ps
from penstock.layers import RWKV6Config
from penstock.layers.chains import Choice, recorded

EVERY = [*MIXERS.values(), RWKV6Config(head_size=8, mix_rank=5, decay_rank=6, tuned_state=True)]


@pytest.mark.parametrize("sizes", [(2, 1), *slow((2, 5), (4, 5))])
def test_ranks_equal_one_process(sizes):
    """With one pair of cuts for each mixer, all have different ones."""
    ranks, each = sizes
    pairs = pairs_of_cuts(ranks, each * len(EVERY))
    spawned(mixers_alike, ranks, [(config, *pair) for n, config in enumerate(EVERY) for pair in pairs[n * each : (n + 1) * each]])


def test_what_calls_with_a_context_refuse(alone):
    mixer, x = EVERY[0].build(C), torch.randn(2, 9, C)
    of = ps.distributed.ContextParallel
    for given, options, message in (
        (x, {"context": 3}, "RWKV6TimeMix.forward: context must be a ContextParallel or None, got 3 of type int. See penstock.distributed"),
        (x, {"context": of(alone, tokens=8)}, r"x must be of the context's 8 tokens on rank 0, got 9\. Make a context for each batch"),
        (x[:1], {"context": of(alone, tokens=9), "cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must be None with a context"),
        (x, {"context": of(alone, tokens=9, cu_seqlens=torch.tensor([0, 9]))}, "B must be 1 with cu_seqlens, got 2"),
        (x, {"context": of(alone, tokens=9), "state": mixer.initial_state(3, x)}, r"state.shift must be of shape \[2, 24\], got \[3, 24\]"),
    ):
        with pytest.raises(ps.InvalidArgument, match=message):
            mixer(given, **options)
    y, _ = mixer(x.requires_grad_(), context=of(alone, tokens=9))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("name", every(3, MIXERS))
def test_chains_run_the_same_forms(alone, kernels_on_a_cpu, name):
    """Kernels of token shifts and convolutions take the rows before a slice; operators are explained without an exchange."""
    mixer, x = passing.alone(MIXERS[name].build(C)), torch.randn(2, 9, C)
    found = []
    for options in ({}, {"context": ps.distributed.ContextParallel(alone, tokens=9)}):
        with recorded(mixer) as calls:
            mixer(x, **options)
        found.append([(one.chain, one.form) if isinstance(one, Choice) else (one.function, one.explanation.chosen) for one in calls])
    assert found[0] or name == "own_mixer mixer"
    assert found[0] == found[1]
