"""What every call on a GPU promises besides its values: no waiting, CUDA graphs, equal bits, streams, threads, other GPUs.

``WORK`` has forward and backward passes, batched and packed, and updates of a pool, by every implementation. Run with ``pytest -m gpu``.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import deltas
import pytest
import torch
from attention import Attention
from contract import run
from nan_inputs import check_that_it_is_seen
from torch import Tensor

import penstock as ps
from penstock.gpu import direct
from penstock.recurrence import cuda
from penstock.recurrence.operators import RECURRENCE
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


class Work(NamedTuple):
    """Calls on values that can be replaced."""

    values: dict[str, Tensor]
    run: Callable[[], list[Tensor]]
    """Results and gradients."""


def passes(x: Inputs, impl: str, packed: Tensor | None = None) -> list[Tensor]:
    """Output of a forward pass, and the gradients."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.u)]
    output, _ = RECURRENCE(x.variant, (*leaves, packed, None), (None, False, True), impl)
    return [output.detach(), *torch.autograd.grad(output, [t for t in leaves if t is not None], x.v)]


def sequences(variant: str, impl: str, T: int, seed: int = 0, dtype: torch.dtype = BFLOAT16, device: str = "cuda") -> Work:
    """A batch, and packed sequences."""
    x, row = (inputs(variant, Shape(B, T, 2, 64, 64), dtype, device, seed=seed) for B in (2, 1))
    packed = torch.tensor([0, T // 3, T], device=device)
    values = {f"{name} {i}": t for i, one in enumerate((x, row)) for name, t in one.tensors.items()}
    return Work(values, lambda: [*passes(x, impl), *passes(row, impl, packed)])


def updates(variant: str, impl: str, T: int, seed: int = 0, dtype: torch.dtype = BFLOAT16, device: str = "cuda") -> Work:
    """A decode step, and rows of any length."""
    step, rows = inputs(variant, Shape(3, 2, 2, 64, 64), dtype, device, seed), inputs(variant, Shape(1, T, 2, 64, 64), dtype, device, seed)
    slots, ends = torch.tensor([2, -1, 0], device=device), torch.tensor([0, 1, T // 3, T], device=device)

    @torch.no_grad()
    def run() -> list[Tensor]:
        pool = torch.ones(4, 2, 64, 64, device=device)
        x = rows
        tokens = ps.advance(variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots, cu_seqlens=ends, impl=impl)
        x = step
        return [tokens, ps.decode_step(variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots, impl=impl), pool]

    values = {f"{name} {i}": t for i, one in enumerate((step, rows)) for name, t in one.tensors.items()}
    return Work(values, run)


def softmax(impl: str, T: int, seed: int = 0, dtype: torch.dtype = BFLOAT16, device: str = "cuda") -> Work:
    """Packed sequences."""
    case = Attention(H=4, G=2, D=128, dtype=dtype, lengths=((T // 3, T // 3), (1, 1), (T, T)))
    tensors, upstream = case.drawn(device)
    random = torch.Generator(device).manual_seed(seed)
    for x in (tensors["q"], tensors["k"], tensors["v"]):
        x.normal_(generator=random)
    values = {name: tensors[name] for name in "qkv"}
    return Work(values, lambda: list(run(case, tensors, upstream, impl).values()))


def delta(variant: str, impl: str, T: int, seed: int = 0, dtype: torch.dtype = BFLOAT16, device: str = "cuda") -> Work:
    """Packed sequences of the delta rule with raw inputs, where the variant has them, and updates of a pool."""
    row = deltas.VARIANTS[variant]
    raw = row.streams == 1 or row.raw != ""
    case = deltas.Delta(variant, H=2, K=64, V=64, lengths=(T // 3, T - T // 3), dtype=dtype, others=FLOAT32, raw=raw)
    pooled = deltas.PooledDelta(variant, H=2, K=64, V=64, lengths=(1, T), slots=(2, 0), dtype=dtype, others=FLOAT32, raw=raw)
    calls, upstream = {"": case.tensors(device), "in place ": pooled.tensors(device)}, case.upstream(device)
    values = {before + name: x for before, one in calls.items() for name, x in one.items() if x is not None and name not in KEPT}
    random = torch.Generator(device).manual_seed(seed)
    for name, x in values.items():
        x.normal_(generator=random)
        if name.endswith(" g") or name == "g":
            x.abs_().neg_()

    def both() -> list[Tensor]:
        pool = calls["in place "]["state"].clone()
        with torch.no_grad():
            output = pooled.call(calls["in place "] | {"state": pool}, "auto")
        return [*run(case, calls[""], upstream, impl).values(), output, pool]

    return Work(values, both)


KEPT = ("a", "b", "cu_seqlens", "slots")
"""The arguments of ``delta`` whose values are not replaced: states have no bound with any a and b."""
needs_cuda = pytest.mark.skipif(cuda.available() is not None, reason="cuda-core is not installed")
CALLS = [*((name, "auto") for name in VARIANTS), ("gla", "triton_chunkwise"), ("rwkv6", "triton_recurrent")]
WORK = [
    *(pytest.param(partial(made, *call), id=f"{made.__name__}-{'-'.join(call)}") for call in CALLS for made in (sequences, updates)
      if (made, call[1]) != (updates, "triton_chunkwise")),
    *(pytest.param(partial(made, name, "cuda"), id=f"{made.__name__}-{name}-cuda", marks=needs_cuda)
      for name in ("rwkv5", "rwkv6") for made in (sequences, updates)),
    *(pytest.param(partial(delta, name, impl), id=f"{name}-{impl}") for name in deltas.VARIANTS for impl in ("auto", "triton_recurrent")),
    pytest.param(partial(softmax, "auto"), id="softmax-auto"),
]  # fmt: skip
every_call = pytest.mark.parametrize("make", WORK)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(one, other) for one, other in zip(found, wanted))


@every_call
def test_the_host_does_not_wait_for_the_device(make):
    """Neither a first call, whose launches are planned and compiled, nor later ones."""
    work = make(333)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            work.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_call
def test_calls_can_be_captured(make):
    """A CUDA graph replays them on new values."""
    wanted = [make(200, seed).run() for seed in (0, 1)]
    work = make(200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work.run()
    for seed, expected in enumerate(wanted):
        for name, values in make(200, seed).values.items():
            work.values[name].copy_(values)
        graph.replay()
        assert same(found, expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@every_call
def test_equal_calls_give_equal_bits(make, dtype):
    work = make(777, dtype=dtype)
    first = work.run()
    for _ in range(3):
        assert same(work.run(), first)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 512)])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_of_many_programs_give_equal_bits(variant, dtype, K, V):
    """All multiprocessors are busy, and programs begin beside others: what one of 10,000 changes is found."""
    x = inputs(variant, Shape(4, 2048, 8, K, V), dtype, "cuda")
    first = passes(x, "auto")
    for _ in range(10):
        assert same(passes(x, "auto"), first)


@every_call
def test_launches_through_tritons_runner_give_equal_bits(make, monkeypatch):
    """As when a tool has set hooks."""
    work = make(333)
    first, again = work.run(), work.run()
    monkeypatch.setattr(direct, "hooked", lambda: True)
    assert same(again, first)
    assert same(work.run(), first)


@every_call
def test_other_streams_and_threads(make):
    work, found = make(500), []
    wanted = work.run()
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(work.run())
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(same(one, wanted) for one in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@every_call
def test_another_gpu_than_the_current_one(make):
    with torch.cuda.device(0):
        there, here = (make(100, device=f"cuda:{index}") for index in (1, 0))
        for name, values in here.values.items():
            there.values[name].copy_(values)
        assert same([x.cpu() for x in there.run()], [x.cpu() for x in here.run()])
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_compiled_graphs_hold_one_operator(variant):
    x = inputs(variant, Shape(2, 130, 2, 64, 64), BFLOAT16, "cuda")
    function = partial(getattr(ps, variant), impl="triton_chunkwise")
    wanted = function(*x.tensors.values()).output
    found = torch.compile(lambda *t: function(*t).output, fullgraph=True)(*x.tensors.values())
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("T", "name"), [(1, "triton_recurrent"), (54, "cuda"), (4096, "triton_chunkwise")])
def test_auto_depends_on_length(T, name):
    if name == "cuda":
        pytest.importorskip("cuda.core")
    x = inputs("rwkv6", Shape(1, T, 4, 64, 64), BFLOAT16, "cuda")
    assert ps.explain("rwkv6", *x.tensors.values()).forward == name


def test_checks_reads_values():
    x = inputs("gla", Shape(1, 10, 2, 16, 16), FLOAT32, "cuda")
    with ps.checks(), pytest.raises(ps.RangeError):
        ps.gla(x.q, x.k, x.v, -x.g)


@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_memory_beyond_inputs_and_results(variant):
    """Backward: the states before chunks, bfloat16, 2 bytes an element at K = V = 64, and the float32 sums of all chunks."""
    from penstock.recurrence.triton.states import SUMS

    x = inputs(variant, Shape(4, 2048, 16, 64, 64), BFLOAT16, "cuda")
    elements = x.q.numel()
    passes(x, "auto")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = passes(x, "auto")
    results = sum(t.numel() * t.element_size() for t in found)
    assert torch.cuda.max_memory_allocated() - before - results < 2.5 * elements + SUMS


IMPLEMENTATIONS = {name: ["triton_chunkwise", "triton_recurrent"] for name in (*VARIANTS, *deltas.VARIANTS)} | {
    "softmax_attention": ["triton"]
}
for name, row in VARIANTS.items():
    IMPLEMENTATIONS[name] += ["cuda"] * bool(row.bonus)


@pytest.mark.parametrize("K", [64, 100, 128])
@pytest.mark.parametrize("dtype", [FLOAT32, torch.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(("variant", "impl"), [(name, impl) for name, found in IMPLEMENTATIONS.items() for impl in found])
def test_nan_that_a_gpu_computes_is_seen(variant, impl, dtype, K):
    assert int((torch.zeros(1, device="cuda") / 0).view(torch.int32)) == 0x7FFFFFFF
    if impl == "cuda" and (cuda.available() is not None or K != 64):
        pytest.skip("no call of this implementation")
    check_that_it_is_seen(variant, impl, dtype, "cuda", K, K)
