"""Models on a GPU: values as on a CPU, steps without waiting, and steps in CUDA graphs. Run with ``pytest -m gpu``."""

from contextlib import nullcontext

import pytest
import torch
from architectures import ARCHITECTURES, ATTENDING, SIZES, flat, model_of
from formulas import error
from halved_models import IDS, deep, enlarged, of_its_scale, outputs, power_of

from penstock.layers import linear, modes
from penstock.layers.fused import add_norm
from penstock.layers.norms import RMSNorm
from penstock.layers.shared_input import linears_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

RECURRENT = [name for name in ARCHITECTURES if name not in ATTENDING]


def drawn(B: int, T: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (B, T), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_gradients_equal_those_of_a_cpu(name: str) -> None:
    ids, cu_seqlens = drawn(1, 200), torch.tensor([0, 70, 70, 73, 200])
    ours, theirs = model_of(name).cuda(), model_of(name, torch.float64)
    logits, state = ours(ids.cuda(), cu_seqlens=cu_seqlens.cuda())
    true, end = theirs(ids, cu_seqlens=cu_seqlens)
    assert error(logits.cpu(), true) < 1e-4
    assert all(error(x.cpu(), y) < 1e-4 for x, y in zip(flat(state), flat(end)) if y.any())
    ours.loss(ids.cuda(), ids.roll(-1, 1).cuda(), cu_seqlens.cuda()).backward()
    theirs.loss(ids, ids.roll(-1, 1), cu_seqlens).backward()
    for (key, x), y in zip(ours.named_parameters(), theirs.parameters()):
        assert error(x.grad.cpu(), y.grad) < 1e-3, key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_under_autocast(name: str) -> None:
    """float32 weights, bfloat16 products: relative errors of all gradients together are those of the modules as they are written."""
    ids, exact, errors = drawn(2, 200), model_of(name, torch.float64), []
    exact.loss(ids, ids.roll(-1, 1)).backward()
    for kernels in (True, False):
        model = model_of(name).cuda()
        if not kernels:
            for one in model.modules():
                one.register_forward_hook(lambda module, given, result: None)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(ids.cuda(), ids.roll(-1, 1).cuda())
        loss.backward()
        assert all(one.grad.dtype == torch.float32 for one in model.parameters())
        pairs = zip(model.parameters(), exact.parameters())
        errors.append(sum(error(one.grad.cpu(), other.grad) ** 2 for one, other in pairs))
    assert errors[0] <= 1.5**2 * errors[1]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, RMSNorm])
def test_training_of_a_sum_its_norm_and_maps_of_it(norm: type[torch.nn.Module], added: bool) -> None:
    """In bfloat16 at the sizes of a real model: results and gradients are within roundings of the formula in float64."""
    torch.manual_seed(0)
    C, eps = 2048, torch.finfo(torch.bfloat16).eps
    part, maps = norm(C, 1e-5), [linear.Linear(C, count, bias=False) for count in (C, C // 2, 16)]
    for parameter in (*part.parameters(), *maps[2].parameters()):
        torch.nn.init.normal_(parameter)
    modules = torch.nn.ModuleList([part, *maps]).cuda().bfloat16()
    x, y = (torch.randn(3, 700, C, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    total, normed = add_norm(x, y if added else None, part)
    assert "AddNorm" in normed.grad_fn.name()
    results = [total, *linears_of(normed, maps)]
    assert all("SharedInput" in one.grad_fn.name() for one in results[1:])
    weights, upstream = list(modules.parameters()), [torch.randn_like(one) for one in results]
    inputs = [x, y, *weights] if added else [x, *weights]
    grads = torch.autograd.grad(results, inputs, upstream)
    exact, modules = total.detach().double().requires_grad_(), modules.double()
    normed = part(exact)
    wanted = [exact, *(one(normed) for one in maps)]
    true = torch.autograd.grad(wanted, [exact, *modules.parameters()], [one.double() for one in upstream])
    for found, one in zip((*results, *grads), (*wanted, *([true[0]] * added), *true)):
        assert error(found, one) < 2 * eps


@pytest.mark.parametrize("name", RECURRENT)
def test_the_host_does_not_wait(name: str) -> None:
    """Training on packed sequences, and an update of a pool with a prompt, a decode step and a skipped row."""
    model, ids, cu_seqlens = model_of(name).cuda(), drawn(1, 40).cuda(), torch.tensor([0, 30, 31, 40]).cuda()
    slots, pool = torch.tensor([2, 0, -1]).cuda(), model.initial_state(4)
    for mode in ("default", "error"):  # compiled before
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model.loss(ids, ids, cu_seqlens).backward()
            model.advance(ids, pool, cu_seqlens=cu_seqlens, slots=slots, last_only=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECURRENT)
def test_steps_in_cuda_graphs(name: str) -> None:
    model, ids, slots = model_of(name).cuda(), drawn(3, 8).cuda(), torch.tensor([2, -1, 0]).cuda()
    captured, eager = model.initial_state(4), model.initial_state(4)
    step = ids[:, :1].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.advance(step, captured, slots=slots)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.advance(step, captured, slots=slots)
    for x, y in zip(flat(captured), flat(eager)):
        x.copy_(y)
    for t in range(8):
        step.copy_(ids[:, t : t + 1])
        graph.replay()
        wanted = model.advance(ids[:, t : t + 1], eager, slots=slots)
        assert torch.equal(logits[::2], wanted[::2])
    assert all(torch.equal(x, y) for x, y in zip(flat(captured), flat(eager)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_decode_steps_equal_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    ids, slots = drawn(3, 8), torch.tensor([2, -1, 0])
    ours, theirs = model_of(name, dtype).cuda(), model_of(name, dtype).double()
    pool, exact = ours.initial_state(4), theirs.initial_state(4)
    for t in range(8):
        with modes.in_graph():
            logits = ours.advance(ids[:, t : t + 1].cuda(), pool, slots=slots.cuda())
        true = theirs.advance(ids[:, t : t + 1], exact, slots=slots)
        assert error(logits[::2].cpu(), true[::2]) < 8 * torch.finfo(dtype).eps
    assert all(error(x.cpu(), y) < 8 * torch.finfo(dtype).eps for x, y in zip(flat(pool), flat(exact)) if y.any())


@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.2"])
def test_bits_of_decode_steps_do_not_depend_on_the_number_of_rows(name: str) -> None:
    ROWS = pytest.importorskip("penstock.layers.triton.few_rows_launch").ROWS
    model, ids = model_of(name, torch.bfloat16).cuda(), drawn(ROWS, 4).cuda()
    whole = model.initial_state(ROWS)
    with modes.in_graph():
        wanted = [model.advance(ids[:, t : t + 1], whole) for t in range(4)]
        for rows in (slice(0, 1), slice(3, 5), slice(4, 13)):
            pool = model.initial_state(rows.stop - rows.start)
            found = [model.advance(ids[rows, t : t + 1], pool) for t in range(4)]
            assert all(torch.equal(x, y[rows]) for x, y in zip(found, wanted))
            assert all(torch.equal(x, y[rows]) for x, y in zip(flat(pool), flat(whole)))


@torch.no_grad()
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float16_models_whose_residual_stream_would_overflow(name: str, graph: bool) -> None:
    """They give what the same models give with a small one, by every kernel."""
    power = power_of(name)
    with modes.in_graph() if graph else nullcontext():
        plain, large = (outputs(model.cuda()) for model in (deep(name, 0), enlarged(deep(name, 1), power)))
    assert graph or not enlarged(deep(name, 0), power).cuda()(IDS.cuda()).logits.isfinite().all()
    for x, y in zip(of_its_scale(name, large, power), plain):
        assert y.isfinite().all()
        assert not x.numel() or error(x, y) < 1e-3
