"""The fast path: results and errors do not depend on earlier calls."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import Case, call, draw

import penstock as ps
from penstock.call import declared, memory, private, validation
from penstock.call.memory import Recent
from penstock.call.recompute import recomputing
from penstock.recurrence.operators import ADVANCE, FAMILY, RECURRENCE
from penstock.recurrence.variants import VARIANTS

CASE = Case("rwkv6", B=1, T=5, H=2, K=4, V=4)


@pytest.fixture
def fresh(monkeypatch):
    """Empty caches; returns a list of the functions whose calls are validated."""
    seen = []
    check = validation.check
    for one in (RECURRENCE, ADVANCE):
        monkeypatch.setattr(one, "memory", memory.Memory())
    monkeypatch.setattr(declared, "check", lambda one, *given: seen.append(one.function) or check(one, *given))
    return seen


@pytest.fixture
def values_unread(monkeypatch):
    """As on a GPU, where values are not checked."""
    monkeypatch.setattr(declared, "reads_values", lambda x: False)
    monkeypatch.setattr(validation, "reads_values", lambda x: False)


def test_equal_calls_are_validated_once(fresh, values_unread):
    results = [call(CASE, draw(CASE), "chunkwise").output for _ in range(3)]
    assert len(fresh) == 1
    assert all(torch.equal(x, results[0]) for x in results)


def test_equal_calls_of_a_compiled_function_are_validated_once(fresh, values_unread):
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(CASE).items()}
    compiled = torch.compile(lambda tensors: call(CASE, tensors, "cpu").output, backend="aot_eager", fullgraph=True)
    compiled(tensors).sum().backward()
    validated = len(fresh)
    for _ in range(3):
        compiled(tensors).sum().backward()
    assert len(fresh) == validated


class Counting(dict):
    """Counts lookups."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)


def test_equal_calls_one_after_another_are_not_looked_up(fresh, values_unread):
    """Their keys are compared with the latest one, forward and backward, which takes less time than hashing them."""
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(CASE).items()}
    wanted = call(CASE, tensors, "cpu").output
    wanted.sum().backward()
    RECURRENCE.memory.calls.entries = entries = Counting(RECURRENCE.memory.calls.entries)
    for _ in range(3):
        output = call(CASE, tensors, "cpu").output
        output.sum().backward()
        assert torch.equal(output, wanted)
    assert entries.count == 0
    other = call(CASE, tensors, "cpu", scale=2.0).output
    assert torch.equal(call(CASE, tensors, "cpu", scale=2.0).output, other)
    assert torch.equal(call(CASE, tensors, "cpu").output, wanted)
    assert entries.count == 3


def test_values_are_validated_every_time_on_a_cpu(fresh):
    tensors = draw(CASE)
    call(CASE, tensors, "chunkwise")
    tensors["g"] = -tensors["g"]
    with pytest.raises(ps.RangeError, match="nowhere above 0 or NaN"):
        call(CASE, tensors, "chunkwise")


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "u", "initial_state"])
def test_another_shape_dtype_or_stride_is_another_call(name, fresh, values_unread):
    tensors = draw(CASE)
    wanted = call(CASE, tensors, "chunkwise").output
    call(CASE, tensors | {name: tensors[name].transpose(-1, -2).contiguous().transpose(-1, -2)}, "chunkwise")
    assert len(fresh) == 2
    assert torch.equal(call(CASE, tensors, "chunkwise").output, wanted)
    with pytest.raises(ps.ShapeError):
        call(CASE, tensors | {name: tensors[name][..., :-1]}, "chunkwise")


@pytest.mark.parametrize("options", [{"scale": True}, {"scale": [1]}, {"reverse": 1}, {"output_final_state": 1}, {"impl": 3}])
def test_equal_values_of_wrong_types_are_refused(options):
    tensors = draw(CASE)
    right = {"scale": 1, "reverse": True, "output_final_state": True, "impl": "chunkwise"}
    arguments = [tensors[name] for name in ("q", "k", "v", "g", "u")]
    ps.rwkv6(*arguments, **right)
    with pytest.raises(ps.InvalidArgument):
        ps.rwkv6(*arguments, **(right | options))


def test_scale_may_be_a_whole_number():
    tensors = draw(CASE)
    assert torch.equal(call(CASE, tensors, "cpu", scale=2).output, call(CASE, tensors, "cpu", scale=2.0).output)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fast_path_equals_dispatcher(variant):
    """With and without the dispatcher: output, state and gradients."""
    found = []
    for observed in (False, True):
        case = Case(variant, B=1, T=9)
        tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
        inputs = [x for x in tensors.values() if x is not None]
        if observed:
            with Recording():
                assert not private.fast(tensors.values())
                result = call(case, tensors, "chunkwise")
        else:
            assert private.fast(tensors.values())
            result = call(case, tensors, "chunkwise")
        found.append([*result, *torch.autograd.grad([result.output.sum(), result.final_state.square().sum()], inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*found))


class Recording(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_see_one_operator():
    tensors = draw(CASE)
    with Recording() as recording:
        call(CASE, tensors, "chunkwise")
    assert "penstock.recurrence.default" in recording.seen


def test_the_backward_implementation_saves_residuals_forward(fresh, values_unread, monkeypatch):
    """With "auto" and gradients, an implementation that saves residuals and runs the backward pass also runs the forward pass."""
    last = FAMILY.implementations[-1]
    kept = []

    def backward(p, upstream):
        kept.append(upstream.residuals)
        return last.gradients(p, upstream)

    keeps = replace(
        last, name="keeps", backward=backward, forward_with_residuals=lambda p: (last.forward(p), (p.q,)),
        avoids=lambda problem, mode: "slow" if mode == "forward" else None,
    )  # fmt: skip
    monkeypatch.setattr(FAMILY, "implementations", (keeps, *FAMILY.implementations))
    tensors = draw(CASE)
    arguments = {name: tensors[name] for name in ("k", "v", "g", "u")}
    assert ps.explain("rwkv6", tensors["q"], *arguments.values()).forward != "keeps"
    q = tensors["q"].requires_grad_()
    assert ps.explain("rwkv6", q, *arguments.values()).forward == "keeps"
    torch.autograd.grad(call(CASE, tensors | {"q": q}, "auto").output.sum(), q)
    assert torch.equal(kept[0][0], q)
    with recomputing():
        torch.autograd.grad(call(CASE, tensors | {"q": q}, "auto").output.sum(), q)
    assert kept[1] == ()
    torch.autograd.grad(call(CASE, tensors | {"q": q}, "chunkwise").output.sum(), q)
    assert len(kept) == 2


def test_saved_tensors_with_changed_strides_are_validated_again(fresh, values_unread):
    tensors = draw(CASE)
    tensors["q"] = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    call(CASE, tensors, "cpu").output.sum().backward()
    assert len(fresh) == 1
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x):
        output = call(CASE, tensors, "cpu").output
    output.sum().backward()
    assert len(fresh) == 2


def test_caches_evict_the_least_recently_used(monkeypatch):
    class Entry:
        used = 0

    recent = Recent(4)
    entries = {name: recent.put(name, Entry()) for name in "abcd"}
    assert recent.get("a") is entries["a"]
    recent.put("e", Entry())
    assert set(recent.entries) == {"a", "c", "d", "e"}


def test_alike_calls_share_a_plan(fresh, values_unread):
    """Packed batches of other lengths are validated and planned once for each power of two."""
    offsets = [torch.tensor([0, 3, T]) for T in range(5, 9)]
    calls = [Case("rwkv6", B=1, T=T, H=2, K=4, V=4, state=False) for T in range(5, 9)]
    outputs = [call(case, draw(case), "chunkwise", cu_seqlens=ends).output for case, ends in zip(calls, offsets)]
    assert len(fresh) == 1
    assert len(RECURRENCE.memory.kinds.entries) == 1
    assert [x.shape[1] for x in outputs] == [5, 6, 7, 8]
    tensors = draw(calls[0])
    with pytest.raises(ps.ShapeError):
        call(calls[0], tensors | {"k": tensors["k"][:, :4]}, "chunkwise", cu_seqlens=offsets[0])
    call(calls[0], draw(replace(calls[0], T=9)), "chunkwise", cu_seqlens=torch.tensor([0, 9, 9]))
    assert len(RECURRENCE.memory.kinds.entries) == 2


def test_failed_calls_are_not_cached(fresh, values_unread):
    tensors = draw(CASE)
    for _ in range(2):
        with pytest.raises(ps.ShapeError):
            call(CASE, tensors | {"k": tensors["k"][:, :1]}, "auto")
    assert not RECURRENCE.memory.calls.entries


def test_concurrent_calls_share_a_cache():
    tensors, found = draw(CASE), []
    threads = [threading.Thread(target=lambda: found.append(call(CASE, tensors, "chunkwise").output)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(x, found[0]) for x in found)


def test_equal_steps_are_validated_once(fresh, values_unread):
    tensors = draw(Case("gla", B=2, T=1))
    arguments = [tensors[name][:, 0] for name in ("q", "k", "v", "g")]
    state = torch.zeros(2, 3, 16, 16)
    outputs = [ps.decode_step("gla", *arguments, state=state.zero_(), impl="chunkwise") for _ in range(3)]
    assert fresh == ["decode_step('gla')"]
    assert all(torch.equal(x, outputs[0]) for x in outputs)
    with pytest.raises(ps.RangeError, match="free of gradients"):
        ps.decode_step("gla", arguments[0].clone().requires_grad_(), *arguments[1:], state=state, impl="chunkwise")


def test_default_retention_decay_allows_gradients_after_inference_mode():
    q = torch.randn(1, 3, 7, 4)
    with torch.inference_mode():
        ps.retention(q, q, q)
    ps.retention(q.requires_grad_(), q, q).output.sum().backward()
    assert q.grad is not None


def test_autocast_chooses_the_call(fresh):
    tensors = draw(CASE)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert call(CASE, tensors, "auto").output.dtype == torch.bfloat16
        assert call(CASE, tensors, "auto").output.dtype == torch.float32


def test_choices_are_cached_by_impl(fresh):
    """A named implementation and auto have separate entries."""
    tensors = draw(CASE)
    for impl in ("auto", "reference", "cpu"):
        call(CASE, tensors, impl)
    (kind,) = RECURRENCE.memory.kinds.entries.values()
    assert {impl: one.name for (_, impl, _), one in kind.choices.items()} == {"auto": "cpu", "reference": "reference", "cpu": "cpu"}
