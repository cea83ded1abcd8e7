"""Functions that make the configuration of a model of the delta rule, one for each architecture."""

from __future__ import annotations

from ..documentation import described
from ..layers import DeltaNetConfig, GatedDeltaNetConfig, KDAConfig
from ..layers.keywords import checked_keywords
from .config import ARGUMENTS, Config, feed_forward

DELTA_ARGUMENTS = ARGUMENTS | {
    "num_heads": "int\nHeads of q and k.",
    "head_dim": "int\nKey channels of a head.",
    "num_v_heads": "int, optional\nHeads of v; each head of q and k serves num_v_heads / num_heads of them. Default: num_heads.",
    "expand_k": "float\nKey channels of all heads / hidden_size.",
    "expand_v": "float\nValue channels of a head / head_dim; of DeltaNet, those of all heads / hidden_size.",
    "allow_neg_eigval": "bool\nWhether beta is doubled, so that eigenvalues of transitions are from -1 to 1.",
    "lower_bound": "float, optional\nThe lowest log decay, below 0. Default: no bound.",
}


@checked_keywords
@described(DELTA_ARGUMENTS)
def delta_net(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 16,
    expand_k: float = 1.0, expand_v: float = 1.0, conv_size: int = 4, allow_neg_eigval: bool = False,
) -> Config:  # fmt: skip
    """DeltaNet with a gated feed-forward layer. Defaults as in published models.

    <arguments>
    """
    mixer = DeltaNetConfig(num_heads, conv_size, expand_k=expand_k, expand_v=expand_v, allow_neg_eigval=allow_neg_eigval)
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size))


@checked_keywords
@described(DELTA_ARGUMENTS)
def gated_deltanet(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 6, head_dim: int = 256,
    num_v_heads: int | None = None, expand_v: float = 2.0, conv_size: int = 4, allow_neg_eigval: bool = False,
) -> Config:  # fmt: skip
    """Gated DeltaNet with a gated feed-forward layer. Defaults as in published models.

    <arguments>

    >>> gated_deltanet(vocab_size=32000, hidden_size=2048, num_layers=21).mixer.expand_v
    2.0
    """
    mixer = GatedDeltaNetConfig(
        num_heads, conv_size, head_dim=head_dim, num_v_heads=num_v_heads, expand_v=expand_v, allow_neg_eigval=allow_neg_eigval
    )  # fmt: skip
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size))


@checked_keywords
@described(DELTA_ARGUMENTS)
def kda(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 16, head_dim: int = 128,
    num_v_heads: int | None = None, expand_v: float = 1.0, conv_size: int = 4, allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
) -> Config:  # fmt: skip
    """Kimi delta attention with a gated feed-forward layer. Defaults as in fla.

    <arguments>
    """
    mixer = KDAConfig(
        num_heads, conv_size, head_dim=head_dim, num_v_heads=num_v_heads, expand_v=expand_v, allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
    )  # fmt: skip
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size))
