"""Context parallelism: slices, all variants over the ranks of a group, and calls that cannot be made."""

import weakref
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import VARIANTS, Call, calls, compare, compare_and_lose_a_rank, run, same_bits, spawned
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.call.operator import explain
from penstock.tokens.context import slices


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
@settings(max_examples=200, deadline=None)
def test_slices_have_every_sequence(lengths, data):
    """Each token is in the sequence that it is in on the whole axis; an empty sequence is on one rank."""
    total = sum(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))
    offsets = [0, *cuts, total]
    found, seen = slices(lengths, offsets), []
    for one, begin in zip(found, accumulate(lengths, initial=0)):
        assert one.begin == begin
        for n in one.sequences:
            a, b = max(offsets[n], one.begin), min(offsets[n + 1], one.end)
            seen += [(n, t) for t in range(a, b)] or [(n, None)]
            assert (n, None) not in seen or offsets[n] == offsets[n + 1]
        if one.sequences:
            assert one.enters == (one.begin < one.end and offsets[one.sequences[0]] < one.begin)
            assert one.leaves == (one.begin < one.end and offsets[one.sequences[-1] + 1] > one.end)
    wanted = [(n, t) for n, (a, b) in enumerate(pairwise(offsets)) for t in (range(a, b) if a < b else [None])]
    assert sorted(seen, key=str) == sorted(wanted, key=str)


def test_four_ranks_equal_one_process():
    spawned(compare, 4, calls(4, 44))


def test_three_ranks_equal_one_process():
    spawned(compare, 3, calls(3, 44))


def test_two_ranks_equal_one_process_carry_nan_and_report_a_lost_rank():
    spawned(compare_and_lose_a_rank, 2, calls(2, 44))


def test_outputs_have_the_bits_of_one_process_with_the_same_cuts():
    spawned(same_bits, 3, [Call(name, (70, 3, 64), None, True, False, torch.float32) for name in VARIANTS])


def test_one_rank_is_a_plain_call(alone):
    q, k, v = (torch.randn(1, 9, 2, 4) for _ in range(3))
    context = ps.distributed.ContextParallel(alone, tokens=9)
    assert repr(context) == "ContextParallel(rank 0 of 1, tokens 0 to 9)"
    found = ps.linear_attention(q, k, v, context=context, output_final_state=True)
    assert all(torch.equal(*pair) for pair in zip(found, ps.linear_attention(q, k, v, output_final_state=True)))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    assert ps.distributed.ContextParallel(mesh["cp"], tokens=9).slices == context.slices


def test_what_a_context_takes(alone):
    of = ps.distributed.ContextParallel
    with pytest.raises(ps.DtypeError, match=r"group must be a ProcessGroup or a DeviceMesh, got 3 of type int\. Start the processes with"):
        of(3, tokens=9)
    with pytest.raises(ps.RangeError, match="tokens must be the number of tokens of this rank, at least 0, got -1"):
        of(alone, tokens=-1)
    with pytest.raises(ps.ShapeError, match=r"lengths must be the tokens of 1 ranks, 9 of them on rank 0, got \[8\]"):
        of(alone, tokens=9, lengths=[8])
    with pytest.raises(ps.RangeError, match="cu_seqlens must be offsets that begin at 0, never fall and end at the 9 tokens of all ranks"):
        of(alone, tokens=9, cu_seqlens=torch.tensor([0, 8]))


def test_what_calls_with_a_context_refuse(alone):
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    context = ps.distributed.ContextParallel(alone, tokens=9)
    for options, message in (
        ({"context": 3}, "linear_attention: context must be a ContextParallel or None, got 3 of type int"),
        ({"context": context, "reverse": True}, "reverse must be False with a context, got True. Flip the tokens"),
        ({"context": context, "cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must be None with a context"),
        ({"context": context, "initial_state": torch.zeros(2, 2, 4, 4)}, r"initial_state must be of shape \[N,H,K,V\] = \[1, 2, 4, 4\]"),
        ({"context": ps.distributed.ContextParallel(alone, tokens=8)}, "q must be of the context's 8 tokens on rank 0, got 9"),
    ):
        with pytest.raises(ps.InvalidArgument, match=message):
            ps.linear_attention(q, k, v, **options)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("name", VARIANTS)
def test_transforms_are_refused(alone, name, transform):
    """They would leave out what other ranks contribute."""
    case = Call(name, (9,), None, True, True, torch.float32)
    tensors, context = case.drawn(), ps.distributed.ContextParallel(alone, tokens=9)
    k = tensors["k"][None] if transform is torch.func.vmap else tensors["k"]
    with pytest.raises(ps.RangeError, match=rf"{name}: the call must be outside of torch\.func transforms and forward-mode"):
        transform(lambda k: run(case, tensors | {"k": k}, context=context).output.sum())(k)


def test_a_graph_is_used_twice(alone):
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    output = ps.linear_attention(q, k, v, context=ps.distributed.ContextParallel(alone, tokens=9)).output
    first, second = (torch.autograd.grad(output.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second))


def test_explained_calls_exchange_nothing(alone, monkeypatch):
    q, k, v = (torch.randn(1, 9, 2, 4) for _ in range(3))
    context = ps.distributed.ContextParallel(alone, tokens=9)
    monkeypatch.setattr(context, "run", None)
    found = explain(ps.linear_attention, q, k, v, context=context)
    assert str(found) == str(explain(ps.linear_attention, q, k, v, output_final_state=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_checkpoints_keep_no_tensors_of_a_call(alone, name, packed):
    """Gradients are equal to the bit, and what a checkpointed function makes is freed after the forward pass."""
    case = Call(name, (70,), (30, 40) if packed else None, True, True, torch.float32)
    tensors, kept = case.drawn(), []
    context = ps.distributed.ContextParallel(alone, tokens=70, cu_seqlens=case.offsets)

    def function(**given):
        made = {name: x * 1 for name, x in given.items()}
        kept.extend(weakref.ref(x.untyped_storage()) for x in made.values())
        return run(case, tensors | made, context=context)

    results = []
    for call in (function, partial(checkpoint, function, use_reentrant=False)):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items() if x is not None}
        kept.clear()
        output, final = call(**leaves)
        assert (call is function) != all(one() is None for one in kept)
        results.append(torch.autograd.grad(output.sin().sum() + final.sin().sum(), list(leaves.values())))
    assert all(torch.equal(*pair) for pair in zip(*results))
