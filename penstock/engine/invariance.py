"""The padding of steps that makes the bits of a token independent of the number of tokens.

Linear maps run our kernels (``layers.modes.rows_alike``), except float64 on a CPU. That goes to MKL, where the bits of a row depend on
the number of rows and, in small maps, on whether the row's index is odd. Element-wise operators compute the last elements of a tensor by
other instructions than whole vectors (with MKL, also exp of the last row). So the engine pads a step with at least one skipped token, to a
multiple of a block. It finds the smallest block for which a token gets equal bits at any index, among any number of tokens. On a GPU, a
block of one token, without skipped ones, is tried first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import EngineError
from ..layers import SoftmaxAttentionState
from ..layers.arguments import mapped
from ..layers.attention_pages import PagedAttentionState
from ..layers.modes import rows_alike
from ..layers.quantized import QuantizedLinear
from ..models import CausalLM, State
from ..models.arguments import named_tensors

BLOCKS = (4, 8, 16, 32, 64)
"""Blocks in the order of trials. On a CPU, 4 or 8 suffice with MKL 2024.2 and AVX2, also with AVX-512."""
VECTOR = 32
"""The most float32 numbers that element-wise operators of a CPU compute at a time: two vectors, with AVX-512 of 16 numbers each. The rest
at the end of a tensor takes other instructions."""
LIVE = 3
"""The most tokens that are compared. With one skipped token they fit into the smallest block of a CPU."""


def smallest_block(model: CausalLM, most_tokens: int) -> int:
    """The smallest of ``BLOCKS`` that holds for passes of up to ``most_tokens`` tokens. Raises EngineError if none does."""
    on_gpu = model.like().is_cuda
    for block in (1, *BLOCKS) if on_gpu else BLOCKS:
        if (on_gpu or _in_vectors(model, block)) and _holds(model, block, most_tokens):
            return block
    raise EngineError(
        f"Engine: batch_invariant must be False here, got True. With {torch.get_num_threads()} threads, products of this model depend on "
        f"the number of rows, also in multiples of {BLOCKS[-1]}. Try torch.set_num_threads(1)."
    )


def padding(tokens: int, block: int) -> int:
    """The number of skipped tokens after ``tokens``. A block of 1 needs none."""
    return block - tokens % block if block > 1 else 0


def _in_vectors(model: CausalLM, block: int) -> bool:
    """Whether the tensors of a block of tokens in layers consist of whole vectors: probes rarely detect different bits of last elements."""
    layers = [x for name, x in model.named_parameters() if name not in ("embeddings.weight", "head.weight")]
    widths = {x.shape[-1] for x in layers} | {x.shape[0] for x in layers if x.dim() == 2}
    for one in model.layers.modules():
        widths |= {one.in_features, one.out_features} if isinstance(one, QuantizedLinear) else set()
    return all(block * width % VECTOR == 0 for width in widths)


def _holds(model: CausalLM, block: int, most_tokens: int) -> bool:
    """Whether a few tokens get bitwise equal logits and states at several indices of passes of several sizes."""
    wanted: list[Tensor] | None = None
    whole = most_tokens + padding(most_tokens, block)
    sizes = [block, 2 * block, 3 * block, 7 * block, whole]
    if model.like().is_cuda:
        sizes += [64 << n for n in range(6)]  # sizes of graphs; libraries choose among many kernels there
    for tokens in sorted({min(size, whole) for size in sizes}, reverse=True):
        live = min(tokens, LIVE)
        last = tokens - live - (block > 1)
        for place in sorted({0, last // 2, last // 2 + (last > 1), last}):  # even and odd indices
            with rows_alike():
                found = _probe(model, tokens, place, live)
            if wanted is None:
                wanted = found
            elif not all(torch.equal(one, right[:live]) for one, right in zip(found, wanted)):
                return False
    return True


def _pool(model: CausalLM) -> State:
    """A pool of ``LIVE`` rows, in softmax attention layers with a page each."""

    def with_pages(cache: SoftmaxAttentionState) -> PagedAttentionState:
        found = cache.paged(LIVE + 1, 1)
        found.pages[:, 0] = torch.arange(1, LIVE + 1)
        return found

    pool: State = mapped(model.initial_state(LIVE, max_length=0), with_pages, SoftmaxAttentionState)
    return pool


@torch.no_grad()
def _probe(model: CausalLM, tokens: int, place: int, live: int) -> list[Tensor]:
    """Logits and states of ``live`` decode rows from ``place`` on. All others are skipped pieces of a prompt."""
    device, V = model.like().device, model.config.vocab_size
    pool = _pool(model)
    model.advance(torch.arange(2 * LIVE, device=device).view(LIVE, 2) % V, pool)
    ids = torch.arange(tokens, device=device) * (7 + tokens) % V
    ids[place : place + live] = torch.arange(live, device=device) * 5 % V
    ends = [0, *range(place, place + live + 1), tokens]
    rows = torch.tensor([-1, *range(live), -1], device=device)
    logits = model.advance(ids[None], pool, cu_seqlens=torch.tensor(ends, device=device), slots=rows)
    return [logits[0, place : place + live], *(x[:live] for _, x in named_tensors(pool))]
