"""RWKV-6 ("Finch", x060): configuration and causal language model.

The ``state_dict`` has the names and shapes of the published ``RWKV-x060-*.pth`` files.

Source: Peng et al. 2024, arXiv 2404.05892; initialisation as in github.com/BlinkDL/RWKV-LM, ``RWKV-v5/src/model.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..errors import Complaints, DtypeError, RangeError, ShapeError, described
from ..layers.rwkv6 import ChannelMix, State, TimeMix
from ..recurrence.functional import STEP_TOKENS
from .arguments import check_state, check_tokens, check_whole
from .sampling import check_sampling, sample


@dataclass(frozen=True)
class Configuration:
    """The sizes of an RWKV-6 model. Raises DtypeError for sizes that are not whole numbers, RangeError for wrong values.

    >>> Configuration(vocab_size=65536, num_layers=24, hidden_size=2048, intermediate_size=7168).heads
    32
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """In published models 3.5 * hidden_size, rounded down to a multiple of 32."""
    head_size: int = 64
    mix_rank: int = 32
    """Rank of the five token-shift offsets; 64 in published models of hidden_size >= 4096."""
    decay_rank: int = 64
    """Rank of the decay; 128 in published models of hidden_size >= 4096."""

    def __post_init__(self) -> None:
        complaints = Complaints("Configuration")
        for field in fields(self):
            check_whole(complaints, field.name, getattr(self, field.name), 1)
        if not complaints.found and self.hidden_size % self.head_size:
            complaints.add(RangeError, "hidden_size", f"a multiple of head_size = {self.head_size}", self.hidden_size)
        complaints.raise_any()

    @property
    def heads(self) -> int:
        """H, the number of heads of the recurrence."""
        return self.hidden_size // self.head_size


class Block(nn.Module):
    """``x += TimeMix(ln1(x)); x += ChannelMix(ln2(x))``; the first block starts with ``x = ln0(x)``."""

    def __init__(self, sizes: Configuration, layer: int) -> None:
        super().__init__()
        C, num_layers = sizes.hidden_size, sizes.num_layers
        self.ln0 = nn.LayerNorm(C) if layer == 0 else None
        self.ln1 = nn.LayerNorm(C)
        self.ln2 = nn.LayerNorm(C)
        self.att = TimeMix(C, sizes.head_size, sizes.mix_rank, sizes.decay_rank, layer=layer, num_layers=num_layers)
        self.ffn = ChannelMix(C, sizes.intermediate_size, layer=layer, num_layers=num_layers)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map x [B,T,C] to y of the same shape and the new state."""
        x = self._input_norm(x)
        y, state = self.att(self.ln1(x), state)
        x = x + y
        y, state = self.ffn(self.ln2(x), state)
        return x + y, state

    def step(self, x: Tensor, state: State) -> Tensor:
        """Map x [B,T,C], T from 1 to 16, to y of the same shape; ``state`` is updated in place."""
        x = self._input_norm(x)
        x = x + self.att.step(self.ln1(x), state)
        return x + self.ffn.step(self.ln2(x), state)

    def _input_norm(self, x: Tensor) -> Tensor:
        return x if self.ln0 is None else self.ln0(x)


class RWKV6(nn.Module):
    """A causal language model: maps tokens to logits of the next token.

    >>> model = RWKV6(Configuration(vocab_size=11, num_layers=2, hidden_size=16, intermediate_size=32, head_size=8))
    >>> logits, state = model(torch.tensor([[3, 1, 4]]))
    >>> logits, state = model(torch.tensor([[1, 5]]), state)  # continues after the first call
    >>> logits.shape
    torch.Size([1, 2, 11])
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        if not isinstance(configuration, Configuration):
            complaints = Complaints("RWKV6")
            complaints.add(DtypeError, "configuration", "a Configuration", described(configuration))
            complaints.raise_any()
        sizes = self.configuration = configuration
        self.emb = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes, layer) for layer in range(sizes.num_layers))
        self.ln_out = nn.LayerNorm(sizes.hidden_size)
        self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        nn.init.uniform_(self.emb.weight, -1e-4, 1e-4)  # ln0 follows
        nn.init.orthogonal_(self.head.weight, 0.5 * math.sqrt(max(sizes.vocab_size / sizes.hidden_size, 1)))

    def initial_state(self, batch: int) -> list[State]:
        """The state before the first token of ``batch`` sequences: one ``State`` of zeros for each block."""
        complaints = Complaints("initial_state")
        check_whole(complaints, "batch", batch, 0)
        complaints.raise_any()
        sizes = self.configuration
        return [State.zeros(batch, sizes.hidden_size, sizes.head_size, like=self.emb.weight.detach()) for _ in self.blocks]

    def forward(self, tokens: Tensor, state: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """Logits after every token, and the state after the last token. Differentiable.

        tokens : int64 or int32 Tensor [B,T]
            From 0 to vocab_size - 1. Checked on a CPU, and on other devices inside ``penstock.checks()``.
        state : list of State, optional
            The state that an earlier call returned for the same B sequences. It is not changed. Default: ``initial_state(B)``.

        Returns logits [B,T,vocab_size] and the new state. Raises ShapeError, DtypeError, DeviceError or RangeError.
        """
        self._check("RWKV6", tokens, state)
        after = []
        x = self.emb(tokens)
        for block, before in zip(self.blocks, state or self.initial_state(tokens.shape[0])):
            x, new = block(x, before)
            after.append(new)
        return self.head(self.ln_out(x)), after

    @torch.no_grad()
    def step(self, tokens: Tensor, state: list[State]) -> Tensor:
        """Logits after every token, [B,T,vocab_size], for T from 1 to 16; ``state`` is updated **in place**.

        Arguments and errors as for ``forward``. Computes no gradients. A step that raises one of these errors changes nothing.
        """
        self._check("RWKV6.step", tokens, state, step=True)
        return self._step(tokens, state)

    def _step(self, tokens: Tensor, state: list[State]) -> Tensor:
        x = self.emb(tokens)
        for block, block_state in zip(self.blocks, state):
            assert isinstance(block, Block)  # for mypy: nn.ModuleList has no element type
            x = block.step(x, block_state)
        logits: Tensor = self.head(self.ln_out(x))
        return logits

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Generate ``count`` tokens for each of B sequences: int64 [B,count].

        tokens : int64 or int32 Tensor [B,T]
            The prompts, T at least 1.
        count : int
            At least 0.
        temperature : float
            Divides the logits. Finite and at least 0; 0 takes the most likely token.
        top_p : float
            Sample from the smallest set of most likely tokens whose probabilities sum to at least this; above 0 and at most 1.
        generator : torch.Generator, optional
            Source of random numbers. Default: torch's global generator.

        Raises ShapeError, DtypeError, DeviceError or RangeError.
        """
        complaints = Complaints("generate")
        check_whole(complaints, "count", count, 0)
        check_sampling(complaints, temperature, top_p, generator, self.emb.weight.device)
        complaints.raise_any()
        self._check("generate", tokens)
        if tokens.shape[1] == 0:
            raise ShapeError("generate: tokens must be of shape [B,T] with T at least 1, got T = 0. Start with at least one token.")
        logits, state = self(tokens)
        sampled = tokens.new_empty(tokens.shape[0], count, dtype=torch.int64)
        for i in range(count):
            if i > 0:
                logits = self._step(sampled[:, i - 1 : i], state)
            sampled[:, i] = sample(logits[:, -1], temperature, top_p, generator)
        return sampled

    def _check(self, function: str, tokens: Tensor, state: list[State] | None = None, *, step: bool = False) -> None:
        """Raise for wrong tokens or a wrong state; the state of a step must be writable."""
        complaints, sizes = Complaints(function), self.configuration
        check_tokens(complaints, tokens, sizes.vocab_size, self.emb.weight.device)
        complaints.raise_any()
        B, T = tokens.shape
        if step and T > STEP_TOKENS:
            remedy = "Call the model itself for longer sequences."
            complaints.add(ShapeError, "T", f"at most {STEP_TOKENS} tokens a sequence", T, remedy)
        if step or state is not None:
            axes = {"B": B, "C": sizes.hidden_size, "H": sizes.heads, "K": sizes.head_size, "V": sizes.head_size}
            check_state(complaints, state, sizes.num_layers, axes, self.emb.weight, written=step)
        complaints.raise_any()
