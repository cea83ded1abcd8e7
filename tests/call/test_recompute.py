"""Selective recomputation: the same gradients, from the inputs of results that are not kept."""

import gc
import threading
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.call.recompute import active, again, recomputing


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


class Chain:
    """Two activations, each before a linear map, and how often each was computed."""

    def __init__(self):
        self.x, self.weights, self.calls = drawn(5, 4), [drawn(3, 4, seed=1), drawn(2, 3, seed=2)], Counter()
        self.results = []

    def activated(self, n, x, change=lambda y: y):
        def function(x):
            self.calls[n] += 1
            y = torch.sin(x)
            self.results.append(weakref.ref(y.untyped_storage()))
            return y

        return F.linear(change(again(function(x), function, x)), self.weights[n])

    def loss(self, **options):
        return self.activated(1, self.activated(0, self.x, **options), **options).square().sum()

    def gradients(self, loss, **options):
        return torch.autograd.grad(loss, (self.x, *self.weights), **options)

    def alive(self):
        gc.collect()
        return sum(one() is not None for one in self.results)


def kept(function):
    """What a function returns, and the bytes that autograd keeps of it."""
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = function()
    return result, sum(size for _, size in sizes.values())


def test_gradients_have_the_same_bits_and_results_are_kept_only_while_they_are_used():
    plain, chain = Chain(), Chain()
    wanted = plain.gradients(plain.loss())
    with recomputing():
        loss = chain.loss()
    assert chain.alive() == 0
    for retain in (True, False):
        chain.calls.clear()
        assert all(torch.equal(x, y) for x, y in zip(chain.gradients(loss, retain_graph=retain), wanted))
        assert chain.calls == {0: 1, 1: 1}
        assert chain.alive() == 0


def test_outer_hooks_see_what_is_kept():
    def run():
        with recomputing():
            return Chain().loss()

    _, most = kept(Chain().loss)
    _, least = kept(run)
    assert most - least == 8 * (5 * 4 + 5 * 3)


def test_results_follow_from_results():
    """Inputs of a call that are results are not kept either."""
    x, weights, calls = drawn(6, 4), [drawn(4, seed=1), drawn(4, seed=2)], Counter()

    def first(x):
        calls["first"] += 1
        return x.exp()

    def second(x):
        calls["second"] += 1
        return x.sin(), x.cos()

    def loss():
        y = again(first(x), first, x)
        pair = again(second(y), second, y)
        return sum((one @ weight).sum() for one, weight in zip(pair, weights))

    wanted = torch.autograd.grad(loss(), (x, *weights))
    with recomputing():
        found = loss()
    calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found, (x, *weights)), wanted))
    assert calls == {"first": 1, "second": 1}


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.T.contiguous().T,
        lambda y: y.flip(1)[:, ::1],
        lambda y: y[1:, 1:].repeat(1, 2)[:, :4],
        lambda y: y.T.flatten().view(4, 5).T,
        lambda y: torch._neg_view(y),
        lambda y: y[::2],
        lambda y: y.expand(2, *y.shape)[1],
        lambda y: y.detach().clone().requires_grad_() + y,
    ],
)
def test_any_view_of_a_result(view):
    x, weight = drawn(5, 4), drawn(3, 4, seed=1)

    def loss():
        y = view(again(torch.tanh(x), torch.tanh, x))
        return F.linear(y[:, :4] if y.shape[1] >= 4 else y, weight[:, : y.shape[1]]).square().sum()

    wanted = torch.autograd.grad(loss(), (x, weight))
    with recomputing():
        found = loss()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found, (x, weight)), wanted))


def test_a_result_changed_in_place_is_kept():
    chain, plain = Chain(), Chain()
    with recomputing():
        loss = chain.loss(change=lambda y: y.mul_(2))
    wanted = plain.gradients(plain.loss(change=lambda y: y.mul_(2)))
    assert all(torch.equal(x, y) for x, y in zip(chain.gradients(loss), wanted))


@pytest.mark.parametrize("which", ["an input of a call", "another tensor"])
def test_kept_tensors_changed_in_place_are_an_error(which):
    x, weight = drawn(5, 4), drawn(3, 4, seed=1)
    with recomputing():
        y = x * 1
        loss = F.linear(again(torch.sin(y), torch.sin, y), weight).sum()
    with torch.no_grad():
        (y if which == "an input of a call" else weight).add_(1)
    with pytest.raises(RuntimeError, match=r"backward: a tensor \[., .\] that is needed for gradients was modified in place: it is at"):
        loss.backward()


def test_results_that_need_no_gradients_are_kept():
    """They may come from other kernels than results that need some."""
    calls = []
    x, weight = drawn(5, 4).detach(), drawn(3, 4)

    def function(x):
        calls.append(1)
        return x.sin()

    with recomputing():
        F.linear(again(function(x), function, x), weight).sum().backward()
    with recomputing(), torch.no_grad():
        again(function(x), function, x)
    assert len(calls) == 2


def test_a_function_that_returns_its_input():
    """The input is no result, so to have it does not take a call."""
    x, weight, calls = drawn(5, 4), drawn(3, 4), []

    def function(x):
        calls.append(torch.is_grad_enabled())
        return x.sin(), x

    with recomputing():
        _, same = again(function(x), function, x)
        F.linear(same, weight).sum().backward()
        assert calls == [True]
        y, _ = again(function(x), function, x)
        F.linear(y, weight).sum().backward()
    assert calls == [True, True, False]


def test_steps_without_a_backward_pass_leave_nothing():
    """A node that keeps its own result is no cycle."""
    x, results = drawn(5, 4), []
    for _ in range(3):
        with recomputing():
            y = x.exp()
        results.append(weakref.ref(y.untyped_storage()))
        del y
    gc.collect()
    assert not any(one() is not None for one in results)


def test_what_uses_some_of_the_results_leaves_none():
    """A backward pass from another loss, or a tool that reads what a node keeps."""
    x, weights, made = drawn(5, 4), [drawn(3, 4, seed=n) for n in range(3)], []

    def function(x):
        y = x.sin()
        made.append(weakref.ref(y.untyped_storage()))
        return y

    def alive():
        gc.collect()
        return [one() is not None for one in made]

    with recomputing():
        y = again(function(x), function, x)
        losses = [(y @ weight.T).sum() for weight in weights]
        nodes = [F.linear(y, weight).grad_fn for weight in weights]
        del y
    wanted = torch.autograd.grad((x.sin() @ weights[0].T).sum(), weights[0])
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(losses[0], weights[0], retain_graph=True)[0], wanted[0])
    assert torch.equal(nodes[0]._saved_self, x.sin())
    assert alive() == 4 * [False]
    torch.autograd.grad(sum(losses), x)  # one call for all of them
    assert alive() == 5 * [False]


def test_outer_hooks_may_change_strides():
    """As ``save_on_cpu(pin_memory=True)`` does. Results have the strides of the forward pass."""
    x, weight = drawn(5, 4), drawn(3, 4, seed=1)

    def loss(x):
        return F.linear(again(torch.tanh(x), torch.tanh, x), weight).square().sum()

    for view in (lambda x: x.T.contiguous().T, lambda x: x[:, :1].expand(-1, 4)):
        wanted = torch.autograd.grad(loss(view(x)), (x, weight))
        with saved_tensors_hooks(lambda x: x.detach().clone(memory_format=torch.contiguous_format), lambda x: x), recomputing():
            found = loss(view(x))
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found, (x, weight)), wanted))


def test_fake_tensors_are_kept():
    """Their memory has no address."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x, weight = torch.empty(5, 4, requires_grad=True), torch.empty(3, 4, requires_grad=True)
        with recomputing():
            loss = F.linear(again(torch.sin(x), torch.sin, x), weight).sum()
        loss.backward()
    assert weight.grad.shape == weight.shape


def test_second_derivatives():
    def second(context):
        chain = Chain()
        with context():
            loss = chain.loss()
        (dx, *_) = chain.gradients(loss, create_graph=True)
        return chain.gradients(dx.square().sum())

    assert all(torch.equal(x, y) for x, y in zip(second(recomputing), second(nullcontext)))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_that_of_the_forward_pass(inside):
    x, weights = drawn(5, 4).detach().float().requires_grad_(), [drawn(6, 4, seed=1).detach().float(), drawn(3, 6, seed=2).detach().float()]
    dtypes = []

    def function(x):
        y = F.linear(x, weights[0]).relu()
        dtypes.append(y.dtype)
        return y

    weights[1].requires_grad_()
    with recomputing(), torch.autocast("cpu", torch.bfloat16, enabled=inside):
        loss = F.linear(again(function(x), function, x), weights[1]).float().square().sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        loss.backward()
    assert dtypes == 2 * [torch.bfloat16 if inside else torch.float32]


def test_inside_of_a_checkpoint():
    chain, plain = Chain(), Chain()

    def run(x):
        with recomputing():
            return chain.activated(0, x)

    loss, bytes_kept = kept(lambda: checkpoint(run, chain.x, use_reentrant=False).square().sum())
    found = torch.autograd.grad(loss, (chain.x, chain.weights[0]))
    wanted = torch.autograd.grad(plain.activated(0, plain.x).square().sum(), (plain.x, plain.weights[0]))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))
    assert bytes_kept == 8 * 5 * (3 + 4)  # the result, which its square needs, and the input


def test_around_a_checkpoint():
    """Code inside of it runs as without recomputation, in both passes: else it would keep other tensors when it runs again."""
    seen, x, weight = [], drawn(5, 4), drawn(3, 4, seed=1)

    def run(x):
        seen.append(active())
        y = again(torch.sin(x), torch.sin, x)
        return F.linear(y * y if active() else y.exp().log(), weight)

    with recomputing():
        assert active()
        loss = checkpoint(run, x, use_reentrant=False).square().sum()
        assert active()
    assert seen == [False]
    found = torch.autograd.grad(loss, (x, weight))
    assert seen == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(run(x).square().sum(), (x, weight))))


def test_threads_have_contexts_of_their_own():
    found = []

    def run(n):
        for _ in range(20):
            chain = Chain()
            with recomputing():
                loss = chain.loss()
            found.append(chain.gradients(loss))

    wanted = Chain()
    wanted = wanted.gradients(wanted.loss())
    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, wanted))


def test_compiled_functions_decide_themselves():
    x, weight = drawn(5, 4), drawn(3, 4, seed=1)

    def loss(x):
        with recomputing():
            return F.linear(again(torch.sin(x), torch.sin, x), weight).sum()

    wanted = torch.autograd.grad(loss(x), (x, weight))
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), (x, weight))
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted))
