"""Generation of one sequence, token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ..errors import Complaints, RangeError, ShapeError
from ..layers.sizes import check_whole
from .causal_lm import CausalLM
from .sampling import check_logits, check_sampling, sample

PROMPT_TOKENS = 2048
"""Tokens of a prompt per call of the model; the state is carried over."""


def stream(
    model: CausalLM,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    end: int | Collection[int] | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """At most ``count`` tokens that follow a prompt, each as soon as it is sampled.

    prompt : sequence of int
        At least one token.
    end : int or collection of int, optional
        Stop at this token, or at one of these; it is not returned.
    vocab_size : int, optional
        Sample only tokens below it: the tokenizer's size, if the model's is larger.

    Other arguments and errors as for ``CausalLM.generate``.
    """
    device = model.like().device
    complaints = Complaints("stream")
    check_whole(complaints, "count", count, 0)
    check_sampling(complaints, temperature, top_p, generator, device)
    if len(prompt) == 0:
        complaints.add(ShapeError, "prompt", "at least one token", "none")
    if vocab_size is not None and not 1 <= vocab_size <= model.config.vocab_size:
        remedy = "Use the tokenizer that belongs to the model."
        complaints.add(RangeError, "vocab_size", f"from 1 to the model's {model.config.vocab_size}", vocab_size, remedy)
    complaints.raise_any()
    ends = {end} if end is None or isinstance(end, int) else {*end}
    return _tokens(model, prompt, count, temperature, top_p, ends, vocab_size, generator)


def _tokens(
    model: CausalLM, prompt: Sequence[int], count: int, temperature: float, top_p: float, ends: Collection[int | None],
    vocab_size: int | None,
    generator: torch.Generator | None,
) -> Iterator[int]:  # fmt: skip
    state = model.initial_state(1, max_length=len(prompt) + count)
    given = torch.tensor([list(prompt)], device=model.like().device)
    for n in range(count):
        for piece in given.split(PROMPT_TOKENS, 1):
            logits = model.advance(piece, state, last_only=True)
        check_logits("stream", logits, last=True)
        token = sample(logits[:, :vocab_size], temperature, top_p, generator)
        if n == 0:
            given = given[:, :1].clone()
        given[:, 0] = token
        found = int(token)
        if found in ends:
            return
        yield found
