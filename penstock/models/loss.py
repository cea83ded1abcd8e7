"""Cross entropy of a linear map's outputs, without storing all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call import private
from ..call.autocast import autocasting
from ..call.declaration import FLOATS, INDICES, Argument
from ..call.validation import check_tensor, reads_values
from ..errors import Complaints, DtypeError, RangeError, described, shortened
from ..layers.chains import Chain, ChainForm, plain
from ..layers.examples import Draw, examples
from ..layers.linear import plain_weights
from ..layers.sizes import check_whole
from ..layers.triton import launching, refusal
from ..tokens import borders
from ..tokens.context import ContextParallel
from ..tokens.dtypes import state_dtype

CHUNK_TOKENS = 2048
"""Tokens whose logits are in memory at once: 256 MB of bfloat16 for a vocabulary of 65,536. Fewer tokens take longer, because each chunk
adds to the gradient of the weight."""

FLOAT16_TOKENS = 512
"""If matrix products round to float16, gradients of float16 logits are divided by a power of two, so that their products with x, summed
over the tokens of a chunk, are at most this many times the largest element of x."""

FLOAT16_SCALE = 2.0**15
"""If matrix products have float32 results, gradients of float16 logits, at most 1, are multiplied by this. Probabilities down to 2e-9
then keep all bits."""

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean", chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    r"""Cross entropy of the logits :math:`x W^T`, as ``F.cross_entropy``, with the logits of one chunk of tokens in memory.

    .. math:: loss_t = \log \sum_v e^{x_t \cdot W_v} - x_t \cdot W_{label_t}

    Gradients are computed in the forward pass, chunk by chunk; the backward pass only multiplies them (for ``reduction="none"``, it
    recomputes the logits). Logits are computed in the dtype of x, or under autocast in its dtype; exponentials and sums, and the
    sum over chunks of the gradient of the weight, are float32 (float64 for float64 x). The gradient of the weight is rounded to its dtype
    once, after the multiplication. On NVIDIA GPUs, since torch 2.11, the gradient of x is too, and no product of a chunk is rounded, except
    in compiled graphs. A graph takes any number of tokens.

    x : Tensor [...,C]
    weight : Tensor [V,C]
        In the dtype of x, except under autocast.
    labels : int64 or int32 Tensor [...]
        From 0 to V - 1, or ``ignore_index``. Values are checked on a CPU, and on other devices inside ``penstock.checks()``.
    ignore_index : int
        Tokens with this label have loss 0 and are not counted by the mean. Without any other token, the mean is NaN.
    reduction : "mean", "sum" or "none"
    chunk_tokens : int
        At least 1.

    Returns a float32 (or float64) scalar, for "none" a Tensor [...]. Differentiable with respect to x and weight, any number of times.
    Second derivatives, forward derivatives, batches of gradients and ``torch.func`` need the logits of all tokens in memory.

    Raises ShapeError, DtypeError, DeviceError or RangeError.

    >>> x, weight, labels = torch.randn(3, 5, 8), torch.randn(11, 8), torch.randint(11, (3, 5))
    >>> loss = linear_cross_entropy(x, weight, labels)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten()))
    True
    """
    _check("linear_cross_entropy", x, weight, labels, ignore_index, reduction, chunk_tokens)
    return _linear_cross_entropy(x, weight, labels, ignore_index, reduction, chunk_tokens)


def _linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, reduction: Reduction, chunk_tokens: int) -> Tensor:
    """``linear_cross_entropy`` of arguments that are right."""
    if autocasting(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()  # no gradients are computed for these
    flat = x.reshape(labels.numel(), x.shape[-1])
    targets = labels.reshape(-1).long()
    if private.transforming():
        losses = _formula(flat, weight, targets, ignore_index, reduction)
    else:
        losses = _LinearCrossEntropy.apply(flat, weight, targets, ignore_index, reduction, chunk_tokens)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape) if reduction == "none" else losses


def head_cross_entropy(
    x: Tensor, head: nn.Module, labels: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean",
    chunk_tokens: int = CHUNK_TOKENS, context: ContextParallel | None = None,
) -> Tensor:  # fmt: skip
    """``linear_cross_entropy`` of a head. A head with an adapter, a bias or a quantized weight computes the logits of all tokens.

    With a context, the mean is this rank's part of that over the tokens of all ranks: parts are summed.
    """
    if context is not None and reduction == "mean":
        part = head_cross_entropy(x, head, labels, ignore_index=ignore_index, reduction="sum", chunk_tokens=chunk_tokens)
        count = borders.total(context, (labels != ignore_index).sum())
        return torch.where(count > 0, part / count.clamp(min=1), part.detach() / count)  # without labels NaN, whose gradients are 0
    weights, options = plain_weights([head]), (ignore_index, reduction, chunk_tokens)
    if weights is not None:
        _check("loss", x, weights[0], labels, *options)
        return _linear_cross_entropy(x, weights[0], labels, *options)
    logits: Tensor = head(x)
    _check("loss", logits, logits.new_empty(1).expand(logits.shape[-1], logits.shape[-1]), labels, *options)
    flat = logits.reshape(-1, logits.shape[-1]).to(state_dtype(logits.dtype))
    losses = F.cross_entropy(flat, labels.reshape(-1).long(), ignore_index=ignore_index, reduction=reduction)
    return losses.view(labels.shape) if reduction == "none" else losses


class _LinearCrossEntropy(torch.autograd.Function):
    """x [T,C], weight [V,C], labels [T]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, reduction: Reduction, chunk_tokens: int) -> Tensor:
        ctx.options, ctx.dtype = (ignore_index, reduction, chunk_tokens), x.dtype
        wanted = (False, False) if reduction == "none" else ctx.needs_input_grad[:2]
        loss, *found = _losses(x, weight, labels, None, ctx.options, wanted)
        ctx.save_for_backward(x, weight, labels, *found)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, *found = ctx.saved_tensors
        if torch.is_grad_enabled() or private.batched(gradient):
            return *_again(x, weight, labels, gradient, ctx.options, ctx.needs_input_grad[:2]), None, None, None, None
        if ctx.options[1] == "none":
            _, *found, _ = _losses(x, weight, labels, gradient, ctx.options, ctx.needs_input_grad[:2])
            dx, dweight = (None if one is None else one.to(ctx.dtype) for one in found)
            return dx, dweight, None, None, None, None
        dx, dweight, later = found
        factor = (gradient * later).view(1, 1)  # an axis, so that products are computed in its dtype
        dx, dweight = (
            None if one is None else torch.mul(one, factor, out=torch.empty_like(one, dtype=ctx.dtype)) for one in (dx, dweight)
        )  # fmt: skip
        return dx, dweight, None, None, None, None


Options = tuple[int, Reduction, int]
"""``ignore_index``, ``reduction`` and ``chunk_tokens``."""
Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""The loss, or for "none" those of the tokens; gradients of x and weight where they are wanted; and the factor that these still need."""


def _losses(x: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor | None, options: Options, wanted: tuple[bool, bool]) -> Losses:
    """Losses and gradients. ``upstream``: the gradients of the losses, only for "none"."""
    call = x, weight, labels, upstream, *options, *wanted, _float32_products(x, weight)
    if not torch.compiler.is_compiling():
        return _computed(*call)
    loss, dx, dweight, later = _in_graphs(*call)
    return loss, dx if wanted[0] else None, dweight if wanted[1] else None, later


def _computed(
    x: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor | None, ignore_index: int, reduction: str, chunk_tokens: int,
    wants_dx: bool, wants_dweight: bool, wide: bool,
) -> Losses:  # fmt: skip
    """``_losses``; ``wide`` as ``_float32_products``."""
    counted, wanted = labels != ignore_index, (wants_dx, wants_dweight)
    one = x.new_ones((), dtype=state_dtype(x.dtype))
    if reduction == "none":
        given = one.expand(labels.shape) if upstream is None else upstream
        return *_pass(x, weight, labels, counted, given, wanted, chunk_tokens, wide), one
    share = 1 / counted.sum().to(one.dtype) if reduction == "mean" else one
    now, later = share, one
    if x.dtype == torch.float16:
        # gradients of a mean would underflow: the factor is applied in the backward pass, after the loss scale
        down = 1 << (min(chunk_tokens, len(labels)) // FLOAT16_TOKENS).bit_length()
        now = one * FLOAT16_SCALE if wide else one / down
        later = share.masked_fill(share.isinf(), 0) / now
    losses, dx, dweight = _pass(x, weight, labels, counted, now.expand(labels.shape), wanted, chunk_tokens, wide)
    return losses.sum() * share, dx, dweight, later


@torch.library.custom_op("penstock::linear_cross_entropy", mutates_args=())
def _in_graphs(
    x: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor | None, ignore_index: int, reduction: str, chunk_tokens: int,
    wants_dx: bool, wants_dweight: bool, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``_computed`` in compiled graphs. They would unroll the loop over chunks, and so be compiled again for each number of tokens.

    A gradient that is not wanted is an empty tensor.
    """
    loss, dx, dweight, later = _computed(
        x, weight, labels, upstream, ignore_index, reduction, chunk_tokens, wants_dx, wants_dweight, wide
    )  # fmt: skip
    return loss, x.new_empty(0) if dx is None else dx, x.new_empty(0) if dweight is None else dweight, later


@_in_graphs.register_fake
def _(
    x: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor | None, ignore_index: int, reduction: str, chunk_tokens: int,
    wants_dx: bool, wants_dweight: bool, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = state_dtype(x.dtype)
    loss = x.new_empty(labels.shape if reduction == "none" else (), dtype=dtype)
    dx = torch.empty_like(x, dtype=dtype if wide else x.dtype) if wants_dx else x.new_empty(0)
    return loss, dx, torch.empty_like(weight, dtype=dtype) if wants_dweight else x.new_empty(0), x.new_empty((), dtype=dtype)


def _formula(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, reduction: Reduction) -> Tensor:
    """``_LinearCrossEntropy`` with the logits of all tokens in memory."""
    return F.cross_entropy((x @ weight.T).to(state_dtype(x.dtype)), labels, ignore_index=ignore_index, reduction=reduction)


def _again(
    x: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor, options: tuple[int, Reduction, int], wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight that can be differentiated again, and of batches under vmap."""
    with torch.enable_grad():
        apart = x.view_as(x), weight.view_as(weight)  # one tensor may be passed as both
        losses = _formula(*apart, labels, *options[:2])
    inputs = [one for one, needed in zip(apart, wanted) if needed]
    found = iter(torch.autograd.grad(losses, inputs, gradient, create_graph=torch.is_grad_enabled()))
    return next(found) if wanted[0] else None, next(found) if wanted[1] else None


def _pass(
    x: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, gradient: Tensor, wanted: tuple[bool, bool], chunk_tokens: int, wide: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [T], and the gradients of x and weight for the gradients [T] of the losses.

    The gradient of the weight is not rounded to its dtype, that of x only where products are.
    """
    return CROSS_ENTROPY(_Pass(x, weight, labels, counted, gradient, wanted, chunk_tokens, wide))


class _Pass(NamedTuple):
    """The arguments of ``_pass``."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    counted: Tensor
    gradient: Tensor
    wanted: tuple[bool, bool]
    chunk_tokens: int
    wide: bool
    """As ``_float32_products``."""


def _in_chunks(c: _Pass, of_chunk: Callable[[Tensor, slice, Tensor | None, Tensor], Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``_pass`` with a function of the logits of a chunk, the chunk and the gradients of its losses, which writes the losses."""
    x, weight, wanted = c.x, c.weight, c.wanted
    losses = x.new_empty(c.labels.shape, dtype=state_dtype(x.dtype))
    dx = torch.empty_like(x, dtype=losses.dtype if c.wide else x.dtype) if wanted[0] else None
    dweight = torch.zeros_like(weight, dtype=losses.dtype) if wanted[1] else None
    for begin in range(0, len(c.labels), c.chunk_tokens):
        part = slice(begin, begin + c.chunk_tokens)
        logits = of_chunk(x[part] @ weight.T, part, c.gradient[part] if any(wanted) else None, losses[part])
        if dx is not None:
            _add_product(dx[part], logits, weight, 0, c.wide)
        if dweight is not None:
            _add_product(dweight, logits.T, x[part], 1, c.wide)
        del logits  # its memory is free for those of the next chunk
    return losses, dx, dweight


def _by_kernel(c: _Pass) -> tuple[Tensor, Tensor | None, Tensor | None]:
    launch = launching("cross_entropy")
    targets = c.labels.masked_fill(c.labels < 0, len(c.weight)).masked_fill(~c.counted, -1)

    def of_chunk(logits: Tensor, part: slice, upstream: Tensor | None, losses: Tensor) -> Tensor:
        launch.cross_entropy(logits, targets[part], None if upstream is None else upstream.contiguous(), losses)
        return logits

    return _in_chunks(c, of_chunk)


def _by_torch(c: _Pass) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _in_chunks(c, lambda logits, part, upstream, losses: _chunk(logits, c.labels[part], c.counted[part], upstream, losses))


def _draw(draw: Draw) -> _Pass:
    V = draw.size(130, 32000)
    x, weight, labels = draw("x", 7, 24), draw("weight", V, 24, scale=0.3), draw.whole([0, 129, -100, 64, 3, 128, 1])
    return _Pass(x, weight, labels, labels >= 0, draw("gradient", 7, wide=True), (True, True), 5, _float32_products(x, weight))


CROSS_ENTROPY: Chain[_Pass, tuple[Tensor, Tensor | None, Tensor | None]] = Chain(
    "cross_entropy",
    ChainForm(
        "cross_entropy", _by_kernel, lambda c: refusal(c.x, c.weight, c.gradient) if len(c.weight) else "there is no vocabulary",
        lambda c: ("penstock_cross_entropy",), examples(_draw, gradients=False),
    ),
    plain("formula", _by_torch),
)  # fmt: skip


def _float32_products(x: Tensor, weight: Tensor) -> bool:
    """Whether products of 16-bit tensors are added to float32 tensors without rounding: where kernels run, on NVIDIA, since torch 2.11."""
    if x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != "cuda" or refusal(x, weight) is not None:
        return False
    if torch.version.hip is not None or torch.__version__ < "2.11":
        return False
    return x.dtype == torch.bfloat16 or not torch.backends.cuda.matmul.allow_fp16_accumulation


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int, wide: bool) -> None:
    """``total = beta * total + a @ b``, for a beta of 0 or 1; ``wide`` as ``_float32_products``."""
    if wide:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    else:
        total += a @ b


def _chunk(logits: Tensor, labels: Tensor, counted: Tensor, upstream: Tensor | None, losses: Tensor) -> Tensor:
    """Write the losses [T] of logits [T,V]. Returns, for gradients [T] of the losses, the gradient of the logits in their dtype."""
    dtype, target = logits.dtype, labels.masked_fill(~counted, 0)[:, None]
    logits = logits.to(losses.dtype).log_softmax(1)
    losses.copy_(torch.where(counted, -logits.gather(1, target)[:, 0], 0))
    if upstream is None:
        return logits
    # softmax - one-hot label, in the memory of the logits
    logits.exp_().scatter_add_(1, target, logits.new_full(target.shape, -1.0))
    logits *= upstream[:, None]
    return logits.masked_fill_(~counted[:, None], 0).to(dtype)


def _check(
    function: str, x: object, weight: object, labels: object, ignore_index: object, reduction: object, chunk_tokens: object
) -> None:  # fmt: skip
    complaints = Complaints(function)
    for name, value in (("x", x), ("weight", weight), ("labels", labels)):
        if not isinstance(value, Tensor):
            complaints.add(DtypeError, name, "a torch.Tensor", described(value))
    if reduction not in ("mean", "sum", "none"):
        complaints.add(RangeError, "reduction", "'mean', 'sum' or 'none'", shortened(reduction))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        complaints.add(DtypeError, "ignore_index", "a whole number", described(ignore_index))
    elif not -(2**63) <= ignore_index < 2**63:
        complaints.add(RangeError, "ignore_index", "from -2^63 to 2^63 - 1", shortened(ignore_index))
    check_whole(complaints, "chunk_tokens", chunk_tokens, 1)
    complaints.raise_any()
    assert isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(labels, Tensor)  # noqa: PT018
    axes = " ".join(f"x{n}" for n in range(max(x.dim() - 1, 0)))
    sizes: dict[str, int] = {}
    check_tensor(complaints, Argument("x", f"{axes} C", FLOATS), x, sizes, x.device, "x")
    dtypes = FLOATS if autocasting(x.device.type) else (x.dtype,)
    check_tensor(complaints, Argument("weight", "V C", dtypes), weight, sizes, x.device, "x")
    check_tensor(complaints, Argument("labels", axes, INDICES), labels, sizes, x.device, "x")
    complaints.raise_any()
    if reads_values(labels) and not torch.compiler.is_compiling():
        counted = labels[labels != ignore_index]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= len(weight)):
            value = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
            complaints.add(RangeError, "labels", f"from 0 to {len(weight) - 1} or ignore_index = {ignore_index}", value)
    complaints.raise_any()
