"""The chunked loss against ``F.cross_entropy``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from formulas import error
from torch.nn import functional as F

from penstock import DtypeError, InvalidArgument, RangeError, ShapeError
from penstock.layers import triton
from penstock.models import loss as losses
from penstock.models.loss import linear_cross_entropy

T, C, V = 23, 8, 37


@pytest.fixture(params=["torch", "kernel", "float32 products"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """PyTorch, or the kernel under Triton's interpreter for dtypes other than float64, in blocks smaller than the vocabulary, or PyTorch
    with float32 results of 16-bit matrix products, which only GPUs have.
    """
    if request.param == "kernel":
        module = pytest.importorskip("penstock.layers.triton.cross_entropy")
        monkeypatch.setattr(module, "BLOCK", 32)
        request.getfixturevalue("kernels_on_a_cpu")
    if request.param == "float32 products":
        addmm = torch.addmm

        def wide_addmm(total, a, b, *, out_dtype, beta, out):
            assert a.dtype == b.dtype != total.dtype == out_dtype == torch.float32
            assert out.data_ptr() == total.data_ptr()
            return addmm(total, a.float(), b.float(), beta=beta, out=out)

        monkeypatch.setattr(losses, "_float32_products", lambda x, weight: x.dtype in (torch.float16, torch.bfloat16))
        monkeypatch.setattr(torch, "addmm", wide_addmm)
    return request.param


def arguments(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, C, generator=generator, dtype=torch.float64).to(dtype) for size in (T, V))
    labels = torch.randint(V, (T,), generator=generator)
    return x.requires_grad_(), (weight * 2).requires_grad_(), labels


@pytest.mark.parametrize("chunk_tokens", [1, 5, T, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_loss_and_gradients(dtype: torch.dtype, reduction: str, chunk_tokens: int) -> None:
    x, weight, labels = arguments(dtype)
    labels[::4] = -7
    options = {"ignore_index": -7, "reduction": reduction}
    found = linear_cross_entropy(x, weight, labels, **options, chunk_tokens=chunk_tokens)
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    true = F.cross_entropy(wide[0] @ wide[1].T, labels, **options)
    roundings = 20 * torch.finfo(dtype).eps
    assert error(found, true) < roundings
    upstream = torch.linspace(-1, 2, true.numel(), dtype=torch.float64).view(true.shape)
    for one, other in zip(torch.autograd.grad(found, (x, weight), upstream.to(dtype)), torch.autograd.grad(true, wide, upstream)):
        assert error(one, other) < 10 * roundings


def test_gradcheck() -> None:
    x, weight, labels = arguments()
    for reduction in ("mean", "sum", "none"):
        assert torch.autograd.gradcheck(
            lambda x, weight: linear_cross_entropy(x, weight, labels, reduction=reduction, chunk_tokens=7),  # noqa: B023
            (x, weight),
            fast_mode=True,
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_derivatives(reduction: str) -> None:
    x, weight, labels = arguments()
    labels[::4] = -100

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, labels, reduction=reduction, chunk_tokens=7)

    assert torch.autograd.gradgradcheck(loss, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, weight.detach()), (x,), fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batches_of_gradients(reduction: str, way: str) -> None:
    """Under vmap, as for the Jacobian of the losses of tokens."""
    x, weight, labels = arguments()
    labels[::4] = -100
    found = linear_cross_entropy(x, weight, labels, reduction=reduction, chunk_tokens=7)
    batch = torch.linspace(-1, 2, 3 * found.numel(), dtype=torch.float64).view(3, *found.shape)
    batches = torch.autograd.grad(found, (x, weight), batch, is_grads_batched=True, retain_graph=True)
    for n, upstream in enumerate(batch):
        wanted = torch.autograd.grad(found, (x, weight), upstream, retain_graph=True)
        torch.testing.assert_close([one[n] for one in batches], list(wanted))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_transforms(reduction: str, compiled: bool, way: str) -> None:
    """Gradients of each sample, and forward derivatives. Compiled graphs that have transforms inside do not have the operator."""
    if compiled and way != "torch":
        pytest.skip("transforms use no kernel and no products of another dtype")
    torch._dynamo.reset()
    x, weight, labels = (one.detach() for one in arguments())

    def loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, labels, reduction=reduction).sum()

    def plain(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ weight.T, labels, reduction=reduction).sum()

    samples = x[:20].view(4, 5, C), weight, labels[:20].view(4, 5)
    for transform in (
        lambda f: torch.func.vmap(torch.func.grad(f, (0, 1)), (0, None, 0))(*samples),
        lambda f: torch.func.hessian(f)(x[:3], weight, labels[:3]),
        lambda f: torch.func.jvp(lambda x: f(x, weight, labels), (x,), (x.flip(0),)),
    ):
        found = torch.compile(partial(transform, loss), fullgraph=True, backend="aot_eager")() if compiled else transform(loss)
        torch.testing.assert_close(found, transform(plain))


def test_only_one_gradient_is_computed_if_only_one_is_wanted() -> None:
    x, weight, labels = arguments()
    frozen = weight.detach()
    linear_cross_entropy(x, frozen, labels).backward()
    assert error(x.grad, torch.autograd.grad(F.cross_entropy(x @ frozen.T, labels), x)[0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_matrix_products_of_a_chunk(dtype: torch.dtype) -> None:
    """One for the logits and one for each gradient that is wanted, all of them in the forward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
            return function(*args, **(kwargs or {}))

    x, weight, labels = arguments(dtype)
    frozen = x.detach(), weight.detach()
    for given, expected in (((x, weight), 3), ((x, frozen[1]), 2), ((frozen[0], weight), 2), (frozen, 1)):
        with Products() as products:
            loss = linear_cross_entropy(*given, labels, chunk_tokens=8)
            assert products.count == 3 * expected
            if expected > 1:
                loss.backward()
            assert products.count == 3 * expected
    with Products() as products, torch.no_grad():
        linear_cross_entropy(x, weight, labels, chunk_tokens=8)
    assert products.count == 3


def test_narrow_dtypes_sum_in_float32() -> None:
    x, weight, labels = arguments(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, labels, chunk_tokens=4)
    assert loss.dtype == torch.float32
    loss.backward()
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    true = F.cross_entropy(wide[0] @ wide[1].T, labels)
    true.backward()
    assert error(loss, true) < 5e-3
    for one, other in zip((x, weight), wide):
        assert one.grad.dtype == torch.bfloat16
        assert error(one.grad, other.grad) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_over_chunks_are_rounded_once(dtype: torch.dtype, way: str) -> None:
    """After they are multiplied by the gradient of the loss, which is no power of two here."""
    x, weight, labels = arguments(dtype)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, labels, reduction="sum", chunk_tokens=4), (x, weight), torch.tensor(0.3))
    scale = losses.FLOAT16_SCALE if dtype == torch.float16 and way == "float32 products" else 1.0
    counted, upstream = torch.ones(T, dtype=torch.bool), torch.full((T,), scale)
    x, weight = x.detach(), weight.detach()
    _, dx, dweight = losses._pass(x, weight, labels, counted, upstream, (True, True), 4, losses._float32_products(x, weight))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert dweight.dtype == wide
    assert dx.dtype == (wide if way == "float32 products" else dtype)
    for one, unrounded in zip(found, (dx, dweight)):
        assert torch.equal(one, (unrounded.to(wide) * (torch.tensor(0.3) / scale)).to(dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_second_backward_pass_gives_equal_bits(dtype: torch.dtype, reduction: str) -> None:
    x, weight, labels = arguments(dtype)
    loss = linear_cross_entropy(x, weight, labels, reduction=reduction, chunk_tokens=7).sum()
    first = torch.autograd.grad(loss, (x, weight), torch.tensor(3.0, dtype=loss.dtype), retain_graph=True)
    kept = [one.clone() for one in first]
    for one in first:
        one.zero_()  # gradients share no memory with what is saved
    second = torch.autograd.grad(loss, (x, weight), torch.tensor(3.0, dtype=loss.dtype))
    assert all(torch.equal(one, other) for one, other in zip(kept, second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_small_probabilities(dtype: torch.dtype, way: str) -> None:
    """Gradients of words with probability 6e-8, below the normal range of float16."""
    if dtype == torch.float16 and way != "float32 products":
        pytest.skip("matrix products that round to float16 take logit gradients of at most 1, which are subnormal here")
    x = torch.linspace(1, 2, 64, dtype=dtype)[:, None].requires_grad_()
    weight = torch.zeros(3, 1, dtype=dtype)
    weight[2] = -16
    weight, labels = weight.requires_grad_(), torch.zeros(64, dtype=torch.int64)
    (linear_cross_entropy(x, weight, labels) * 2.0**17).backward()
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    (F.cross_entropy(wide[0] @ wide[1].T, labels) * 2.0**17).backward()
    # the logits are rounded: errors of 16 * eps in them are relative errors of probabilities
    assert error(weight.grad[2], wide[1].grad[2]) < 40 * torch.finfo(dtype).eps


def test_autocast() -> None:
    x, weight, labels = arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels)
    loss.backward()
    assert error(loss, F.cross_entropy(x @ weight.T, labels)) < 1e-2
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_with_a_loss_scale(reduction: str, way: str) -> None:
    """Gradients of a mean over many tokens are below the range of float16 before they are multiplied by the scale."""
    x, weight, labels = arguments(torch.float16)
    times = 400 if way == "torch" else 20  # the interpreter takes a millisecond a token
    x, labels = x.detach().repeat(times, 1).requires_grad_(), labels.repeat(times)
    scale = 2.0**17 if reduction == "mean" else 16.0
    (linear_cross_entropy(x, weight, labels, reduction=reduction) * scale).backward()
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    (F.cross_entropy(wide[0] @ wide[1].T, labels, reduction=reduction) * scale).backward()
    for one, other in zip((x, weight), wide):
        assert one.grad.dtype == torch.float16
        assert error(one.grad, other.grad) < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_compiled_once_for_all_lengths(dtype: torch.dtype, reduction: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients have the bits of eager calls, also where float16 gradients of one chunk are divided by a power of two."""
    if way == "float32 products":
        pytest.skip("compiled graphs do not have them")
    torch._dynamo.reset()
    monkeypatch.setattr(losses, "FLOAT16_TOKENS", 2)

    def loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, labels, reduction=reduction, chunk_tokens=7).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 5, 21, T):
            x, weight, labels = arguments(dtype)
            given = x[:tokens].detach().requires_grad_(), weight, labels[:tokens]
            found, wanted = ([y.detach(), *torch.autograd.grad(y, given[:2])] for y in (call(*given) for call in (compiled, loss)))
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_the_operator_of_compiled_graphs(wanted: tuple[bool, bool], reduction: str, way: str) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        x, weight, labels = (one.detach() for one in arguments(dtype))
        upstream = None if reduction == "mean" else torch.ones(T, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        given = x, weight, labels, upstream, 3, reduction, 5, *wanted, losses._float32_products(x, weight)
        torch.library.opcheck(losses._in_graphs, given)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_sums_of_a_chunk_do_not_overflow(reduction: str) -> None:
    """Where the gradient itself is finite: tokens with the same label, all of them far from it."""
    tokens, scale = 600, 1.0 if reduction == "mean" else 2.0**-8
    x, weight = torch.full((tokens, 2), 200.0, dtype=torch.float16), torch.zeros(V, 2, dtype=torch.float16)
    weight[3] = -0.5
    x.requires_grad_(), weight.requires_grad_()
    labels = torch.full((tokens,), 3)
    (linear_cross_entropy(x, weight, labels, reduction=reduction) * scale).backward()
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    (F.cross_entropy(wide[0] @ wide[1].T, labels, reduction=reduction) * scale).backward()
    assert wide[1].grad.abs().max() > 20
    for one, other in zip((x, weight), wide):
        assert error(one.grad, other.grad) < 2e-3


def test_large_logits_stay_finite() -> None:
    x, weight, labels = arguments(torch.float32)
    loss = linear_cross_entropy(x * 1e4, weight, labels)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_differences_of_large_logits(reduction: str) -> None:
    """Losses and gradients depend on the differences of logits, which are exact here."""
    x, labels = torch.eye(4), torch.arange(4)
    weight = (10000 + torch.randint(16, (V, 4), generator=torch.Generator().manual_seed(0)) / 4).requires_grad_()
    found = linear_cross_entropy(x, weight, labels, reduction=reduction)
    wide = weight.detach().double().requires_grad_()
    true = F.cross_entropy(x.double() @ wide.T, labels, reduction=reduction)
    assert error(found, true) < 1e-6
    upstream = torch.linspace(-1, 2, true.numel()).view(true.shape)
    assert error(torch.autograd.grad(found, weight, upstream)[0], torch.autograd.grad(true, wide, upstream.double())[0]) < 1e-6


def test_no_channels() -> None:
    """All logits are 0."""
    x, weight, labels = (one.detach() for one in arguments(torch.float32))
    found = linear_cross_entropy(x[:, :0].requires_grad_(), weight[:, :0], labels)
    found.backward()
    assert error(found, torch.tensor(float(V)).log()) < 1e-6


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_infinite_logits_and_nan() -> None:
    """A logit of -inf has probability 0. A NaN reaches the results of its token only, and none of a token that does not count."""
    x, weight, labels = arguments(torch.float32)
    logits = (x @ weight.T).detach()
    labels, counted = labels % 20, torch.ones(T, dtype=torch.bool)
    counted[5] = False
    logits[:, 20:], logits[4:6, 1], logits[6] = -torch.inf, torch.nan, -torch.inf
    found, d_logits, upstream = torch.empty(T), logits.clone(), torch.linspace(1, 2, T)
    if triton.refusal(x, weight) is not None:
        d_logits = losses._chunk(d_logits, labels, counted, upstream, found)
    else:
        triton.launching("cross_entropy").cross_entropy(d_logits, labels.masked_fill(~counted, -1), upstream, found)
    leaf, fine = logits.double().requires_grad_(), counted.clone()
    true = F.cross_entropy(leaf, labels, reduction="none")
    true.backward(upstream.double())
    fine[4], fine[6] = False, False
    assert torch.allclose(found[fine].double(), true[fine], atol=1e-5)
    assert torch.allclose(d_logits[fine].double(), leaf.grad[fine], atol=1e-6)
    assert found[[4, 6]].isnan().all()
    assert d_logits[[4, 6], 1].isnan().all()
    assert found[5] == 0
    assert not d_logits[5].any()


def test_labels_outside_of_the_vocabulary_are_nan_on_a_gpu(way: str) -> None:
    """Where their values are not checked."""
    if way != "kernel":
        pytest.skip("checked on a CPU")
    x, weight, labels = arguments(torch.float32)
    labels[3], labels[4] = V, -3
    found = losses._pass(x.detach(), weight.detach(), labels, labels != -100, torch.ones(T), (False, False), 10, False)[0]
    assert found.isnan().nonzero().flatten().tolist() == [3, 4]


def test_no_token_counts() -> None:
    x, weight, labels = arguments()
    assert linear_cross_entropy(x, weight, labels * 0 - 100).isnan()
    assert linear_cross_entropy(x, weight, labels * 0 - 100, reduction="sum") == 0
    assert linear_cross_entropy(x[:0], weight, labels[:0], reduction="sum") == 0
    for dtype in (torch.float16, torch.float64):
        x, weight, labels = arguments(dtype)
        linear_cross_entropy(x, weight, labels * 0 - 100).backward()
        assert not x.grad.any()
        assert not weight.grad.any()


def test_peak_memory_is_one_chunk(way: str) -> None:
    """No tensor of more than chunk_tokens * V elements is made."""
    if way == "kernel":
        pytest.skip("the interpreter makes tensors of bytes")
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max(largest, *(x.numel() for x in [result] if isinstance(x, torch.Tensor)), 0)
            return result

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 4, generator=generator).requires_grad_(), torch.randn(100, 4, generator=generator).requires_grad_()
    with Sizes():
        linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64), chunk_tokens=8).backward()
    assert largest == 800


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        ({"labels": torch.zeros(T + 1, dtype=torch.int64)}, ShapeError, "labels must be of shape"),
        ({"labels": torch.zeros(T)}, DtypeError, "labels must be int32 or int64"),
        ({"labels": torch.full((T,), V)}, RangeError, f"labels must be from 0 to {V - 1} or ignore_index = -100, got {V}"),
        ({"labels": torch.full((T,), -1)}, RangeError, "got -1"),
        ({"weight": torch.zeros(V, C + 1, dtype=torch.float64)}, ShapeError, "weight must be of shape"),
        ({"weight": torch.zeros(V, C)}, DtypeError, "weight must be float64"),
        ({"reduction": "average"}, RangeError, "reduction must be 'mean', 'sum' or 'none', got 'average'"),
        ({"chunk_tokens": 0}, RangeError, "chunk_tokens must be a whole number of at least 1, got 0"),
        ({"ignore_index": 1.5}, DtypeError, "ignore_index must be a whole number"),
        ({"x": 3, "reduction": "x"}, InvalidArgument, "x must be a torch.Tensor"),
    ],
)
def test_wrong_arguments(change: dict, error_type: type[Exception], message: str) -> None:
    x, weight, labels = arguments()
    with pytest.raises(error_type, match=message):
        linear_cross_entropy(**({"x": x, "weight": weight, "labels": labels} | change))
