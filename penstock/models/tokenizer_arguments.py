"""Checks of the arguments of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Complaints, DtypeError, RangeError, described, shortened


def utf8(text: str, special: bool, after: Sequence[int]) -> bytes:
    """UTF-8 of a text. Raises DtypeError for another type, RangeError for lone surrogates, or special tokens in the middle of a text."""
    complaints = Complaints("encode")
    if special and len(after):
        rule = "False for a text that continues tokens"
        complaints.add(RangeError, "special", rule, special, "Files add special tokens to a whole text.")
        complaints.raise_any()
    if not isinstance(text, str):
        complaints.add(DtypeError, "text", "a str", described(text))
        complaints.raise_any()
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        complaints.add(RangeError, "text", "free of lone surrogates", shortened(error.object[error.start : error.end]))
        complaints.raise_any()
        raise


def refuse_panic(function: str, argument: str, error: BaseException) -> None:
    """Raises RangeError for a panic of the package tokenizers, which is no Exception: it would end an engine's thread."""
    if type(error).__name__ == "PanicException":
        complaints = Complaints(function)
        rule = "what the package tokenizers takes with this tokenizer.json"
        complaints.add(RangeError, argument, rule, f"a panic of it ({error})", "Correct the parts of the file.")
        complaints.raise_any()


def check_token(token: int, vocab_size: int) -> None:
    """Raises DtypeError for what is no whole number, RangeError for one that is no token."""
    if type(token) is int and 0 <= token < vocab_size:
        return
    complaints = Complaints("decode")
    if not hasattr(token, "__index__"):
        complaints.add(DtypeError, "token", "a whole number", described(token))
        complaints.raise_any()
    if not 0 <= token < vocab_size:
        complaints.add(RangeError, "token", f"from 0 to {vocab_size - 1}", token, "Use the tokenizer that belongs to the model.")
        complaints.raise_any()
