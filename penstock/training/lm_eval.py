"""A model for the tasks of lm_eval, the evaluation harness of EleutherAI::

    python -m penstock.training.lm_eval --model penstock --model_args path=CHECKPOINT --tasks lambada_openai

Arguments of the model: ``path``, and optionally ``dtype``, ``device`` and ``tokenizer``. In Python, ``register()`` adds the
model to lm_eval under the name "penstock".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ..call.declaration import FLOATS
from ..cores import default_threads
from ..errors import Complaints, MissingExtra, PenstockError, RangeError
from ..files import escape_unwritable
from ..models import CausalLM, load
from ..models.streaming import stream
from ..models.tokenizers import Stream, Tokenizer, ends_of, load_tokenizer, special_tokens_of
from .scoring import score

GENERATED = 256
"""The most generated tokens, unless a task says otherwise."""
GENERATION_KEYS = ("until", "max_gen_toks", "max_tokens", "max_new_tokens", "max_length", "do_sample", "temperature", "top_p")


class Request(Protocol):
    """An ``Instance`` of lm_eval."""

    args: tuple[Any, ...]


class Answers:
    """The three kinds of requests of lm_eval."""

    def __init__(self, model: CausalLM, tokenizer: Tokenizer) -> None:
        self.language_model, self.coder = model, tokenizer
        self.begin = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        """The tokens before a text without context."""

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For (context, continuation): log p(continuation | context), natural logarithm, and whether it is the most likely one."""
        sequences, counts = [], []
        for request in requests:
            context, continuation = request.args
            stripped = context.rstrip()  # tokens begin with spaces, so spaces at the end belong to the continuation
            rest = context[len(stripped) :] + continuation
            before, whole = self.coder.encode(stripped), self.coder.encode(stripped + rest)
            after = whole[len(before) :] if whole[: len(before)] == before else self.coder.encode(rest, after=before)
            sequences.append((before or self.begin) + after)
            counts.append(len(after))
        answers = []
        for one, count in zip(score(self.language_model, sequences), counts):
            first = max(0, len(one.log_p) - count)
            answers.append((one.log_p[first:].sum().item(), bool(one.greedy[first:].all())))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """For (text,): its log probability. The state is carried through the whole text."""
        sequences = [self.begin + self.coder.encode(request.args[0]) for request in requests]
        return [one.log_p.sum().item() for one in score(self.language_model, [tokens or [0] for tokens in sequences])]

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """For (context, options): the text that follows, up to the first of the strings ``until``."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        complaints = Complaints("generate_until")
        for name in options:
            if name not in GENERATION_KEYS:
                complaints.add(RangeError, "options", f"among {', '.join(GENERATION_KEYS)}", repr(name))
        complaints.raise_any()
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        count = next((int(options[name]) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in options), GENERATED)
        sampling = options.get("do_sample", float(options.get("temperature", 0)) > 0)
        begin, special = self.coder.encode(context) or self.begin, special_tokens_of(self.coder)
        tokens = stream(
            self.language_model,
            begin,
            count,
            temperature=float(options.get("temperature", 1)) if sampling else 0,
            top_p=float(options.get("top_p", 1)),
            end={*ends_of(self.coder), *(special[stop] for stop in until if stop in special)},
            vocab_size=min(self.coder.vocab_size, self.language_model.config.vocab_size),
        )
        return _until(self.coder.stream(begin), tokens, until)


def _until(decoder: Stream, tokens: Iterable[int], until: Sequence[str]) -> str:
    """The text of tokens up to the first of the strings; no more tokens are generated than needed."""
    text = ""
    for token in tokens:
        text += decoder.push(token)
        places = [place for place in (text.find(stop) for stop in until) if place >= 0]
        if places:
            return text[: min(places)]
    text += decoder.finish()
    return text[: min((place for place in (text.find(stop) for stop in until) if place >= 0), default=len(text))]


def register() -> Any:
    """Add the model "penstock" to lm_eval, and return its class. Raises MissingExtra if lm_eval is not installed."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise MissingExtra("register: lm_eval must be installed, got none. Run pip install lm_eval.") from error

    @register_model("penstock")
    class Penstock(Answers, LM):  # type: ignore[misc]
        """A checkpoint that ``penstock.models.load`` takes."""

        def __init__(
            self, path: str, dtype: str | None = None, device: str | None = None, tokenizer: str | None = None,
            batch_size: Any = None, max_batch_size: Any = None,
        ) -> None:  # fmt: skip
            # lm_eval always passes batch sizes; tokens are packed here instead
            LM.__init__(self)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            model = load(path, dtype=None if dtype is None else _dtype(dtype), device=device)
            Answers.__init__(self, model, load_tokenizer(tokenizer or path))

    return Penstock


def _dtype(name: str) -> torch.dtype:
    known = {str(one).removeprefix("torch."): one for one in FLOATS}
    complaints = Complaints("lm_eval")
    if name not in known:
        complaints.add(RangeError, "dtype", f"one of {', '.join(known)}", repr(name))
    complaints.raise_any()
    return known[name]


def main() -> None:
    """Run lm_eval's own command with the model."""
    escape_unwritable()
    torch.set_num_threads(default_threads())
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PenstockError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
