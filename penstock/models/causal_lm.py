"""A causal language model from any mixers.

>>> from penstock.models import rwkv6
>>> model = CausalLM(rwkv6(vocab_size=11, num_layers=2, hidden_size=16, head_size=8))
>>> logits, state = model(torch.tensor([[3, 1, 4]]))
>>> logits, state = model(torch.tensor([[1, 5]]), state)  # continues after the first call
>>> logits.shape
torch.Size([1, 2, 11])
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, DtypeError, ShapeError, described
from ..layers.linear import Linear
from ..layers.rwkv import orthogonal
from ..layers.sizes import check_whole
from ..tokens.context import ContextParallel
from .arguments import check_labels
from .backbone import Backbone, LayerState, State
from .config import Config
from .loss import CHUNK_TOKENS, Reduction, head_cross_entropy
from .sampling import check_logits, check_sampling, sample

__all__ = ["CausalLM", "LayerState", "Output", "State"]


class Output(NamedTuple):
    """The result of a model."""

    logits: Tensor
    """[B,T,vocab_size]"""
    state: State
    """After the last token of each sequence."""


class CausalLM(Backbone):
    """A causal language model: maps tokens to logits of the next token. See the docstring of this module.

    Names of parameters: ``embeddings``, ``embedding_norm`` (if there is one), ``layers.{i}.mixer_norm``, ``layers.{i}.mixer``,
    ``layers.{i}.channel_norm``, ``layers.{i}.channel``, ``norm``, ``head``.

    ``gradient_checkpointing = True`` saves only the inputs of layers; the backward pass recomputes the rest.
    ``gradient_checkpointing = "selective"`` recomputes only what takes little time: norms, token shifts, log decays, and the states inside
    recurrences.

    Hooks on layers, mixers, channel mixers, norms, linear maps and embeddings act in every pass, as do wrappers: a module that has any is
    not fused with others. Hooks on the model itself act in ``model(ids)``. In place (``advance``, ``generate``), hooks of layers and mixers
    get pools as states.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        if not isinstance(config, Config):
            complaints = Complaints("CausalLM")
            complaints.add(DtypeError, "config", "a Config", described(config), "See penstock.models.config.")
            complaints.raise_any()
        self.config = config
        self._make(config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()
        if config.embedding_norm:  # as RWKV's training code
            orthogonal(self.head.weight, 0.5 * math.sqrt(max(config.vocab_size / config.hidden_size, 1)))
        else:
            nn.init.normal_(self.head.weight, std=0.02)
        self.tie()

    @property
    def sizes(self) -> Config:
        """``config``."""
        return self.config

    def tie(self) -> None:
        """Tie the head's weight to that of the embeddings, if so configured."""
        if self.config.tie_embeddings and isinstance(self.head, Linear):
            self.head.weight = self.embeddings.weight

    def forward(
        self, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, *, context: ContextParallel | None = None
    ) -> Output:  # fmt: skip
        """Logits after every token, and the state after the last token of each sequence. Differentiable.

        ids : int64 or int32 Tensor [B,T]
            From 0 to vocab_size - 1. Checked on a CPU, and on other devices inside ``penstock.checks()``.
        state : list of LayerState, optional
            The state that an earlier call returned for the same N sequences. It is not changed. Default: before the first token.
        cu_seqlens : int32 or int64 Tensor [N+1], optional
            Packed sequences: B is 1 and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``. Default: N = B.
        context : ContextParallel, optional
            The tokens are those of one rank (docs/scaling.md), and packed sequences are those of the context. States are those of all
            sequences, on every rank.

        Raises ShapeError, DtypeError, DeviceError or RangeError.
        """
        x, state = self._hidden("forward", ids, None, state, cu_seqlens, context=context)
        return Output(self.head(x), state)

    def loss(
        self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, *, state: State | None = None, ignore_index: int = -100,
        reduction: Reduction = "mean", chunk_tokens: int = CHUNK_TOKENS, context: ContextParallel | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross entropy of the next tokens, equal to ``F.cross_entropy(logits.flatten(0, 1), labels.flatten())``, in less memory.

        Only the logits of ``chunk_tokens`` tokens are in memory at once, see ``loss.linear_cross_entropy``.

        labels : int64 or int32 Tensor [B,T]
            The token that follows each of ``ids``: for tokens [B,T+1], ``ids = tokens[:, :-1]`` and ``labels = tokens[:, 1:]``. Tokens
            with label ``ignore_index`` do not count.
        reduction : "mean", "sum" or "none"
            Over the tokens that count; "none" returns [B,T].
        context : ContextParallel, optional
            ``ids`` and ``labels`` are those of one rank. Losses of ranks are summed: each is the rank's part of the mean over the tokens of
            all ranks, and gradients of parameters are its part of those of the mean (docs/scaling.md).

        Other arguments and errors as for ``forward``.

        >>> from penstock.models import gla
        >>> model = CausalLM(gla(vocab_size=11, num_layers=1, hidden_size=16, num_heads=2))
        >>> tokens = torch.randint(11, (2, 7))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        """
        complaints = Complaints("loss")
        check_labels(complaints, labels, ids)
        complaints.raise_any()
        x, _ = self._hidden("loss", ids, None, state, cu_seqlens, context=context, final_states=context is None)
        options: Any = {"ignore_index": ignore_index, "reduction": reduction, "chunk_tokens": chunk_tokens, "context": context}
        return head_cross_entropy(x, self.head, labels, **options)

    @torch.no_grad()
    def advance(
        self, ids: Tensor, state: State, *, cu_seqlens: Tensor | None = None, slots: Tensor | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits after every token [B,T,vocab_size]; the rows of the pool ``state`` are updated **in place**.

        state : list of LayerState
            A pool of P rows, made by ``initial_state(P)``. Without ``slots``, P = N.
        slots : int32 or int64 Tensor [N], optional
            The row of each sequence, all different. A negative slot skips its sequence: no row changes, and its logits are undefined.
        last_only : bool
            Return only the logits after the last token of each sequence, [N,vocab_size]; those of empty sequences are undefined.

        Other arguments and errors as for ``forward``. Computes no gradients. A call that raises one of these errors changes nothing.
        """
        logits: Tensor = self.head(self._advance(ids, None, state, cu_seqlens, slots, last_only=last_only))
        return logits

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, *, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Generate ``count`` tokens for each of B sequences: int64 [B,count].

        ids : int64 or int32 Tensor [B,T]
            The prompts, T at least 1.
        count : int
            At least 0.
        temperature : float
            Divides the logits. Finite and at least 0; 0 takes the most likely token.
        top_p : float
            Sample from the smallest set of most likely tokens whose probabilities sum to at least this; above 0 and at most 1.
        generator : torch.Generator, optional
            Source of random numbers. Default: torch's global generator.

        Raises ShapeError, DtypeError, DeviceError or RangeError, also for logits that are NaN.
        """
        complaints = Complaints("generate")
        check_whole(complaints, "count", count, 0)
        check_sampling(complaints, temperature, top_p, generator, self.like().device)
        complaints.raise_any()
        self._check("generate", ids)
        if ids.shape[1] == 0:
            raise ShapeError("generate: ids must be of shape [B,T] with T at least 1, got T = 0. Start with at least one token.")
        B, T = ids.shape
        state = self.initial_state(B, max_length=T + count)
        sampled = ids.new_empty(B, count, dtype=torch.int64)
        given = ids
        for i in range(count):
            logits = self.advance(given, state, last_only=True)
            check_logits("generate", logits, last=i == count - 1)
            sampled[:, i] = sample(logits, temperature, top_p, generator)
            given = sampled[:, i : i + 1]
        return sampled
