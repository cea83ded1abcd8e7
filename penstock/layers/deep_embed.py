"""DeepEmbed: factors of the channels of a channel mix, by a matrix of each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..call import private
from .as_written import altered
from .chains import Chain, ChainForm, plain
from .examples import HALF, Draw, examples
from .linear import linear
from .modes import in_graph, ready
from .triton import launching, refusal


def deep_embed(k: Tensor, hidden: Tensor, ids: Tensor, table: nn.Module, part: Tensor, up: Tensor, offset: Tensor) -> Tensor:
    r"""``k`` times the factors of each token, [B,T,F].

    .. math:: y = k \cdot (h D up + offset), \qquad D = reshape_{E,E}(table_{id} + part)

    k : Tensor [B,T,F]
    hidden : Tensor [B,T,E]
        h.
    ids : int64 or int32 Tensor [B,T]
        The tokens.
    table : nn.Module
        An embedding with E * E channels.
    part : Tensor [B,T,E*E]
        Added to the matrices of the table.
    up, offset : Tensor [E,F], [1,1,F]
    """
    return DEEP_EMBED(DeepEmbed(k, hidden, ids, table, part, up, offset))


class DeepEmbed(NamedTuple):
    """The arguments of ``deep_embed``."""

    k: Tensor
    hidden: Tensor
    ids: Tensor
    table: nn.Module
    part: Tensor
    up: Tensor
    offset: Tensor


def _refuses(c: DeepEmbed) -> str | None:
    if torch.is_grad_enabled():
        return "gradients are on"
    if private.autocasting():
        return "autocast is on"
    why = altered(c.table, nn.Embedding)
    if why is not None or c.table.max_norm is not None:
        return f"the table {why or 'has max_norm'}"
    tensors = c.k, c.hidden, c.part, c.up, c.offset, c.table.weight
    if (why := refusal(*tensors)) is not None:
        return why
    if any(one.dtype != c.k.dtype for one in tensors):
        return "all tensors must have one dtype"
    if c.ids.numel() == 0:
        return "there are no tokens"
    if c.hidden.shape[-1] > (most := launching("deep_embed_launch").LARGEST):
        return f"it takes matrices of at most {most} rows, got {c.hidden.shape[-1]}"
    return None if all(one.is_contiguous() for one in tensors[3:]) else "parameters must be contiguous"


def _by_kernel(c: DeepEmbed) -> Tensor:
    k, hidden, part = (one.reshape(-1, one.shape[-1]).contiguous() for one in (c.k, c.hidden, c.part))
    early = ready((c.up, c.offset), (c.up, c.offset))
    given = k, hidden, c.ids.reshape(-1).contiguous(), c.table.weight, part, c.up, c.offset.view(-1)
    y: Tensor = launching("deep_embed_launch").deep_embed(*given, early=early)
    return y.view(c.k.shape)


def _by_formula(c: DeepEmbed) -> Tensor:
    E = c.hidden.shape[-1]
    matrices = (c.table(c.ids) + c.part).unflatten(-1, (E, E))
    mixed = (c.hidden[..., None, :] @ matrices.to(c.hidden.dtype)).squeeze(-2)
    return c.k * linear(mixed, c.up.T, c.offset.view(-1)).to(c.k.dtype)


def _draw(draw: Draw) -> DeepEmbed:
    E, F, V = draw.size(5, 32), draw.size(140, 3072), 11
    table = draw.module("table", nn.Embedding(V, E * E))
    k, hidden, part = draw("k", 1, 3, F), draw("hidden", 1, 3, E), draw("part", 1, 3, E * E)
    return DeepEmbed(k, hidden, draw.whole([7, 0, 10])[None], table, part, draw.learned("up", E, F), draw.learned("offset", 1, 1, F))


DEEP_EMBED: Chain[DeepEmbed, Tensor] = Chain(
    "deep_embed",
    ChainForm(
        "deep_embed", _by_kernel, _refuses, lambda c: ("penstock_deep_embed",),
        (*examples(_draw, gradients=False), *examples(_draw, *HALF, gradients=False, within=in_graph)),
    ),
    plain("formula", _by_formula),
)  # fmt: skip
