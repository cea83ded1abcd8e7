"""The engine on a GPU: overlap and CUDA graphs give the tokens of plain steps, and nothing waits for the device."""

from contextlib import nullcontext

import pytest
import torch
from architectures import model_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.choosing import NO_TOKEN
from penstock.engine.graphs import Batch
from penstock.engine.sampler import Sampler
from penstock.engine.scoring import logprobs_of
from penstock.engine.slot_tables import Row
from penstock.layers.linear import linear, linears
from penstock.layers.modes import in_graph, rows_alike

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.2", "mamba2", "gla", "retnet", "linear", "hybrid", "hybrid_window"])
def test_tokens_do_not_depend_on_overlap_graphs_and_other_requests(name):
    model = model_of(name).cuda()
    prompts = [[n % 13] * (20 * n + 1) for n in range(9)]
    params = [SamplingParams(max_tokens=10 * n + 1, seed=n) for n in range(9)]
    plain = Engine(model, slots=1, token_budget=200, cache_bytes=0, overlap=False, cuda_graphs=False)
    wanted = [plain.generate([prompt], some)[0].tokens for prompt, some in zip(prompts, params)]
    engine = Engine(model, slots=5, token_budget=200)
    for _ in range(2):  # the second time with graphs that exist, and with the cache
        assert [result.tokens for result in engine.generate(prompts, params)] == wanted
    engine.check_integrity()
    kinds = {bool(rows) for _, rows in engine._steps.runner.graphs._graphs}
    assert kinds == {False, True}  # steps of decode rows, and steps with pieces


@pytest.mark.parametrize("name", ["rwkv6", "mamba2", "gla"])
def test_graphs_of_any_padding_change_no_state_but_that_of_their_rows(name):
    model = model_of(name).cuda()
    engine = Engine(model, slots=5, token_budget=300, cache_bytes=0)
    engine._pool.memory.view(torch.float32).normal_()
    before = engine._pool.memory.clone()
    engine.warm_up()
    assert torch.equal(engine._pool.memory, before)
    for row, tokens in ((2, 64), (9, 128), (0, 1)):
        others = [n for n in range(10) if n != row]
        engine._steps.runner.graphs.run(Batch([3] * tokens, [-1] * tokens, [0, tokens], [row]))
        assert torch.equal(engine._pool.memory[others], before[others])
        assert not torch.equal(engine._pool.memory[row], before[row])
        before = engine._pool.memory.clone()


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1, "top_p": 0.9, "min_p": 0.01}, {"seed": 1, "logprobs": 2, "top_k": 3}], ids=str
)  # fmt: skip
def test_a_step_does_not_wait_for_the_device(params):
    engine = Engine(model_of("rwkv6").cuda(), slots=5, token_budget=200)
    engine.warm_up()
    given = SamplingParams(max_tokens=300, **params)
    requests = [engine.submit([1] * length, given) for length in (1, 20, 64, 70, 130)]
    for _ in range(10):
        engine.step()
    requests.append(engine.submit([2] * 70, given))
    engine.cancel(requests[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(request.result.error is None for request in requests)
    engine.close()


def test_batch_invariant_log_probabilities_are_equal_to_the_bit():
    model = model_of("rwkv6").cuda()
    alone = Engine(model, slots=1, token_budget=200, cache_bytes=0, batch_invariant=True, cuda_graphs=False)
    prompts = [[n % 13] * (20 * n + 1) for n in range(9)]
    params = [SamplingParams(max_tokens=10 * n + 1, seed=n, logprobs=2) for n in range(9)]
    wanted = [alone.generate([prompt], some)[0].completions[0] for prompt, some in zip(prompts, params)]
    engine = Engine(model, slots=5, token_budget=200, batch_invariant=True)
    for _ in range(2):
        for result, one in zip(engine.generate(prompts, params), wanted):
            assert (result.tokens, result.completions[0].logprobs) == (one.tokens, one.logprobs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "N"), [(2048, 2048), (2048, 7168), (7168, 2048), (2048, 160), (64, 2048), (100, 36)])
def test_bits_of_a_linear_map_do_not_depend_on_the_number_of_tokens(K, N, dtype):
    x, weight = torch.randn(1000, K, device="cuda", dtype=dtype), torch.randn(N, K, device="cuda", dtype=dtype) / K**0.5
    with torch.no_grad(), rows_alike():
        for given in (weight, weight.T.contiguous().T):
            whole = linear(x, given)
            wanted = x.double() @ given.double().T
            assert (whole.double() - wanted).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * wanted.norm()
            for rows in (1, 2, 17, 64, 65, 128, 129, 300, 513):
                assert torch.equal(linear(x[:rows], given), whole[:rows])
                assert torch.equal(linear(x[-rows:], given), whole[-rows:])


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "sizes"), [(2048, (64, 2048, 2048, 2048, 2048)), (2048, (7168, 2048)), (264, (40, 24)), (7168, (2048,))])
def test_bits_of_linear_maps_of_one_launch_do_not_depend_on_the_number_of_tokens(K, sizes, dtype):
    """Also with relu(y)^2 and a gate, and equal in graphs."""
    inputs = [torch.randn(700, K, device="cuda", dtype=dtype) for _ in sizes]
    weights = [torch.nn.Parameter(torch.randn(N, K, device="cuda", dtype=dtype) / K**0.5, requires_grad=False) for N in sizes]
    gate = torch.randn(700, sizes[0], device="cuda", dtype=dtype)
    with torch.no_grad(), rows_alike():
        for options in ({"relu_squared": True}, {"gate": gate}, {}):
            whole = linears(inputs, weights, **options)
            wanted = [x.double() @ weight.double().T for x, weight in zip(inputs, weights)]
            if "gate" in options:
                wanted[0] *= gate.double().sigmoid()
            if "relu_squared" in options:
                wanted[0] = wanted[0].relu().square()
            for y, one in zip(whole, wanted):
                assert (y.double() - one).norm() <= 2 * torch.finfo(dtype).eps * one.norm()
            for graph in (False, True):
                with in_graph() if graph else nullcontext():
                    for rows in (1, 2, 8, 9, 17, 33, 64, 65, 128, 129, 300):
                        for some in (slice(rows), slice(-rows, None)):
                            given = {name: one[some] if name == "gate" else one for name, one in options.items()}
                            found = linears([x[some] for x in inputs], weights, **given)
                            assert all(torch.equal(y, one[some]) for y, one in zip(found, whole)), rows


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
def test_graphs_that_are_captured_in_a_batch_invariant_step_own_their_memory():
    """K is in parts with programs of their own, which count in memory of the graph."""
    x, weight = (torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for rows in (100, 2048))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step():
        with rows_alike(), in_graph():
            return linears([x], [weight])[0]

    with torch.no_grad(), rows_alike():
        wanted = linears([x], [weight])[0]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            found = step()
    for one in (stream, torch.cuda.current_stream()):
        with torch.cuda.stream(one):
            others = [torch.ones(256, dtype=torch.int32, device="cuda") for _ in range(4096)]
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)
        assert all(bool((other == 1).all()) for other in others)


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("rows", [1, 3])
def test_maps_of_views_on_hopper(rows):
    """A single row of any stride, and inputs that do not begin at a multiple of 16 bytes."""
    x, weight = (torch.randn(n, 73, device="cuda", dtype=torch.bfloat16) for n in (rows, 1))
    behind = torch.randn(rows * 72 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(rows, 72)
    with torch.no_grad(), rows_alike():
        for one in (x[:, :72], behind):
            for other in (weight[:, :72], torch.randn(72, 1, device="cuda", dtype=torch.bfloat16).T):
                (found,) = linears([one], [other])
                torch.testing.assert_close(found.double(), one.double() @ other.double().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "N"), [(2048, 2048), (7168, 2048), (100, 37)])
def test_linear_maps_of_few_tokens_in_graphs(K, N, dtype):
    weight = torch.randn(N, K, device="cuda", dtype=dtype) / K**0.5
    for rows in range(1, 5):
        x = torch.randn(rows, K, device="cuda", dtype=dtype)
        with torch.no_grad(), in_graph():
            found = linear(x, weight)
        wanted = x.double() @ weight.double().T
        assert (found.double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("K", "V", "rank"), [(64, 64, 64), (64, 64, 0), (40, 24, 6)])
def test_steps_of_rwkv(K, V, rank, state, dtype):
    """Values are those of float64; bits of a row do not depend on the number of rows; skipped rows change nothing."""

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, device="cuda").to(dtype)

    rwkv_step, R, H = pytest.importorskip("penstock.layers.triton.few_rows_launch").rwkv_step, 128, 32
    r, k, v, gate, u, bias = (normal(*shape) for shape in ((R, H, K), (R, H, K), (R, H, V), (R, H, V), (H, K), (H, K)))
    low, up = (normal(R, rank), normal(rank, H * K) / 8) if rank else (None, None)
    weight, shift, pool = normal(H * V), normal(H * V), normal(R + 5, H, K, V, dtype=state)
    slots = torch.randperm(R + 5, device="cuda")[:R]
    slots[3::7] = -1
    kept, live = pool.clone(), slots >= 0

    def step(pool, n):
        own = None if low is None else low[n]
        return rwkv_step(r[n], k[n], v[n], gate[n], u, bias, own, up, pool, slots[n], weight, shift, 64e-5)

    y = step(pool, slice(None))
    factor = 0 if low is None else (low.double().tanh() @ up.double()).view(R, H, K)
    before, new = kept[slots.clamp(min=0)].double(), k.double()[..., None] * v.double()[..., None, :]
    o = torch.einsum("rhk,rhkv->rhv", r.double(), before + u.double()[..., None] * new).reshape(R, H * V)
    normed = torch.group_norm(o, H, weight.double(), shift.double(), 64e-5).view(R, H, V)
    o, after = normed * torch.nn.functional.silu(gate.double()), before * torch.exp(-torch.exp(bias.double() + factor))[..., None] + new
    for found, wanted in ((y, o), (pool[slots.clamp(min=0)], after)):
        roundings = 20 if found.dtype == torch.float32 else 4  # float32 also has the errors of the exponentials
        assert (found[live].double() - wanted[live]).norm() <= roundings * torch.finfo(found.dtype).eps * wanted[live].norm()
    assert y[~live].abs().max() == 0
    wanted = pool
    for first, last in ((0, 1), (5, 13), (0, 32), (1, 128)):
        pool = kept.clone()
        assert torch.equal(step(pool, slice(first, last)), y[first:last])
        rows = slots[first:last][live[first:last]]
        assert torch.equal(pool[rows], wanted[rows])
        pool[rows] = kept[rows]
        assert torch.equal(pool, kept)


class EveryThird:
    """A constraint."""

    def __init__(self, size):
        self.mask = (int("001" * (size // 3 + 1), 2) & ((1 << size) - 1)).to_bytes(-(-size // 8), "little")


KINDS: dict[str, list[dict[str, object]]] = {
    "drawn": [{"temperature": t, "min_p": m} for t in (0, 0.05, 0.7, 1, 3) for m in (0, 1e-4, 0.1)],
    "limited": [{"top_k": k, "top_p": p} for k in (0, 1, 20, 1000, 40000) for p in (0.5, 0.9, 0.999, 1 - 2**-53, 1)],
    "changed": [
        {"presence_penalty": 0.7 * (n % 2), "frequency_penalty": 0.1 * (n % 3), "repetition_penalty": 1 + 0.3 * (n % 4),
         "logit_bias": {n * m: 2.0 - m for m in range(1, n % 5)}, "top_p": 0.9 if n % 2 else 1}
        for n in range(20)
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [65536, 50277, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_chooses_the_tokens_of_the_formula(size, dtype, kind):
    """Those that plain PyTorch chooses on a CPU, at published vocabularies: equal weights, flat and steep logits, NaN, inf, masks."""
    params = [SamplingParams(**one) for one in KINDS[kind]]
    logits = torch.randn(len(params), size, generator=torch.Generator().manual_seed(0)).mul_(2).to(dtype)
    logits[::5] *= 8
    logits[3, 7], logits[4, 9], logits[6] = float("nan"), float("inf"), 0
    given, found = EveryThird(size) if kind == "changed" else None, []
    for device in ("cuda", "cpu"):
        made = Sampler(len(params), size, torch.device(device))
        rows = [Row(one, n, [n, 5, 5, 7], 2, given if n % 2 else None) for n, one in enumerate(params)]
        x = logits.to(device)
        found.append([made.sample(x, rows, range(len(rows)), [step] * len(rows)).tolist() for step in range(4)])
    assert found[0] == found[1]
    if kind != "changed":  # masks exclude NaN and inf
        assert {one[3] for one in found[0]} == {one[4] for one in found[0]} == {NO_TOKEN}


@pytest.mark.parametrize("size", [65536, 50277])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_of_log_probabilities_equals_the_formula(size, dtype):
    logits = torch.randn(40, size, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
    logits[3, ::2], logits[4, 7] = -float("inf"), float("nan")
    tokens = torch.arange(40) * 999 % size
    for most in (0, 1, 20):
        wanted, found = logprobs_of(logits, tokens, most), logprobs_of(logits.cuda(), tokens.cuda(), most).cpu()
        assert found[4, 0].isnan()
        found[4] = wanted[4] = 0
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[:, 1 + most :], wanted[:, 1 + most :])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.2", "gla"])
def test_another_gpu_than_the_current_one(name, graphs):
    prompts = [[n % 13] * (20 * n + 1) for n in range(5)]
    params = [SamplingParams(max_tokens=20, seed=n, min_p=0.01 * n, top_k=3 * (n % 2)) for n in range(5)]
    found = []
    with torch.cuda.device(0):
        for index in (0, 1):
            engine = Engine(model_of(name, torch.bfloat16).to(f"cuda:{index}"), slots=3, token_budget=200, cuda_graphs=graphs)
            found.append([result.tokens for result in engine.generate(prompts, params)])
        assert torch.cuda.current_device() == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mixer"])
def test_hooks_act_in_every_step(place):
    """Steps with hooks are no graphs, unless it is asked for: then they repeat what hooks computed."""
    model, calls = model_of("rwkv6").cuda(), []
    prompts, params = [[n % 13] * (20 * n + 1) for n in range(4)], SamplingParams(max_tokens=8, temperature=0)
    plain = [result.tokens for result in Engine(model, slots=4, token_budget=200).generate(prompts, params)]
    move = lambda module, given, output: calls.append(1) or (-output[0], *output[1:])  # noqa: E731
    handle = model.get_submodule(place).register_forward_hook(move)
    engine = Engine(model, slots=4, token_budget=200)
    assert engine._steps.runner.graphs is None
    found = [result.tokens for result in engine.generate(prompts, params)]
    assert len(calls) >= 8
    graphs = Engine(model, slots=4, token_budget=200, cuda_graphs=True)
    assert [result.tokens for result in graphs.generate(prompts, params)] == found
    wanted = [model.generate(torch.tensor([prompt], device="cuda"), 8, temperature=0)[0].tolist() for prompt in prompts]
    handle.remove()
    assert found == wanted
    assert found != plain
