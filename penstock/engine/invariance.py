"""How many rows a product of matrices needs for bits that do not depend on the number of rows.

Libraries choose kernels by the shape: with MKL, one, two and three rows take other ones than four and more, and other libraries split
sums over rows of the weight where there are few rows of tokens. In element-wise operators, the last elements of a tensor are computed by
other instructions than whole vectors. So the engine rounds the number of tokens of a step up to a multiple of a block, with tokens that
are skipped, and finds the smallest block for which a token gets equal bits in any place of any number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import EngineError
from ..models import CausalLM
from ..models.arguments import named_tensors

BLOCKS = (4, 8, 16, 32, 64)
"""Tried in this order. On a CPU, 4 suffices with MKL 2024.2 and AVX2."""


def smallest_block(model: CausalLM, most_tokens: int) -> int:
    """The smallest of ``BLOCKS`` that holds for passes of up to ``most_tokens`` tokens. Raises EngineError if none does."""
    for block in BLOCKS:
        if _holds(model, block, most_tokens):
            return block
    raise EngineError(
        f"Engine: batch_invariant must be False here, got True. With {torch.get_num_threads()} threads, products of this model depend on "
        f"the number of rows, also in multiples of {BLOCKS[-1]}. Try torch.set_num_threads(1)."
    )


def _holds(model: CausalLM, block: int, most_tokens: int) -> bool:
    """Whether one token gets equal logits and an equal state at several places of passes of several sizes."""
    wanted: list[Tensor] | None = None
    whole = most_tokens // block * block
    for tokens in sorted({block, 2 * block, 3 * block, 7 * block, whole}):
        for place in sorted({0, tokens // 2, tokens - 1}):
            found = _probe(model, min(tokens, whole), place)
            if wanted is None:
                wanted = found
            elif not all(map(torch.equal, found, wanted)):
                return False
    return True


@torch.no_grad()
def _probe(model: CausalLM, tokens: int, place: int) -> list[Tensor]:
    """Logits and state of a token after two others, among decode rows that differ with ``tokens``."""
    device = model.embeddings.weight.device
    ids = torch.arange(tokens, device=device) * 7 % model.config.vocab_size
    pool = model.initial_state(1)
    history = torch.tensor([[1, 2]], device=device) % model.config.vocab_size
    model.advance(history, pool)
    ids[place] = 3 % model.config.vocab_size
    # the other tokens are pieces of a prompt before and behind it, in rows that are skipped
    ends = [0, place, place + 1, tokens]
    rows = torch.tensor([-1, 0, -1], device=device)
    logits = model.advance(ids[None], pool, cu_seqlens=torch.tensor(ends, device=device), slots=rows)
    return [logits[0, place], *(x for _, x in named_tensors(pool))]
