"""DeepEmbed: factors of the channels of a channel mix, by a matrix of each token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from .chains import Chain, plain
from .linear import linear


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


def _by_formula(c: DeepEmbed) -> Tensor:
    E = c.hidden.shape[-1]
    matrices = (c.table(c.ids) + c.part).unflatten(-1, (E, E))
    mixed = (c.hidden[..., None, :] @ matrices.to(c.hidden.dtype)).squeeze(-2)
    return c.k * linear(mixed, c.up.T, c.offset.view(-1)).to(c.k.dtype)


DEEP_EMBED: Chain[DeepEmbed, Tensor] = Chain("deep_embed", plain("formula", _by_formula))
