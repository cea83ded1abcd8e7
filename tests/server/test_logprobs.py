"""Names and bytes of tokens in log probabilities."""

import json

import pytest
from tokenizer_files import TOKENIZERS, tokenizer_of, written

from penstock.engine import TokenLogprobs
from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import Bytes
from penstock.server.logprobs import CompletionWriter, chat_logprobs, echoed_begin, token_bytes, token_text


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    return tokenizer_of(request.param, tmp_path_factory.mktemp("tokenizers"))


def single(tokenizer, byte):
    """The token of one byte."""
    return next(token for token, value in enumerate(tokenizer.token_bytes) if value == bytes([byte]))


def test_parts_of_characters_are_named_by_their_bytes_in_both_forms(tokenizer):
    tokens = [single(tokenizer, byte) for byte in "é世".encode()]
    names = ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96"]
    found = [TokenLogprobs(token, -1.0, ((token, -1.0), (single(tokenizer, 0x80), -2.0))) for token in tokens]
    legacy = CompletionWriter(tokenizer).write(found, tokens)
    assert legacy.tokens == names
    assert legacy.top_logprobs == [{name: -1.0, "bytes:\\x80": -2.0} for name in names]
    chat = chat_logprobs(tokenizer, found).content
    assert [one.token for one in chat] == names
    assert [one.bytes for one in chat] == [[byte] for byte in "é世".encode()]
    assert [one.top_logprobs[1].bytes for one in chat] == [[0x80]] * 5


def test_texts_and_tokens_without_bytes(tokenizer):
    names = [token_text(tokenizer, token) for token in tokenizer.encode("the cat a")]
    assert "".join(names).lstrip() == "the cat a"
    for token in (tokenizer.end_of_text, tokenizer.vocab_size):
        assert (token_text(tokenizer, token), token_bytes(tokenizer, token)) == (f"token_id:{token}", None)


def test_places_in_a_text_that_follows_a_prompt(tokenizer):
    prompt, tokens = tokenizer.encode("the cat"), tokenizer.encode("the cat sat at")
    text = tokenizer.decode(tokens)[len(tokenizer.decode(prompt)) :]
    tokens = tokens[len(prompt) :]
    found = CompletionWriter(tokenizer, prompt).write([TokenLogprobs(token, -1.0, ()) for token in tokens], tokens)
    assert "".join(found.tokens) == text == " sat at"
    for name, offset in zip(found.tokens, found.text_offset):
        assert text[offset:].startswith(name)


@pytest.mark.parametrize("before", ["\n", "a\n\n", "世\n世", "\n\x80", "\nñ\x80"], ids=repr)
def test_places_after_tokens_of_bytes(tokenizer, before):
    """As of line ends in files of Llama 2: the text of a run of these is known when it ends."""
    run = [single(tokenizer, byte) for byte in before.encode("latin-1" if before.endswith("\x80") else "utf-8")]
    last = tokenizer.encode("the cat")[-1]
    tokens = [*tokenizer.encode("cat"), *run, last, last]
    text = tokenizer.decode(tokens)
    found = CompletionWriter(tokenizer).write([TokenLogprobs(token, -1.0, ()) for token in tokens], tokens)
    assert text.endswith(2 * found.tokens[-1])
    assert [text[offset:] for offset in found.text_offset[-2:]] == [2 * found.tokens[-1], found.tokens[-1]]
    assert found.text_offset == sorted(found.text_offset)
    for name, offset in zip(found.tokens[1:], found.text_offset[1:]):
        assert name.startswith("bytes:") or text[offset:].startswith((name, "\ufffd"))


SPACES = {
    "prefix space": ("bytes", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}),
    "metaspace": (
        "fallback",
        {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        },
    ),
}
"""Files that add a space to the begin of a text that has none, and what they change."""


@pytest.mark.parametrize("text", ["the cat", " the cat", "  the cat"])
@pytest.mark.parametrize("name", [*TOKENIZERS, *SPACES])
def test_places_in_an_echo(name, text, tmp_path):
    if name in SPACES:
        kind, change = SPACES[name]
        file = written(tmp_path, ["the cat"])[kind]
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **change}), "utf-8")
        tokenizer = HuggingFace(file)
    else:
        tokenizer = tokenizer_of(name, tmp_path)
    prompt = tokenizer.encode(text)
    begin = echoed_begin(tokenizer, text, prompt)
    found = CompletionWriter(tokenizer, begin=begin).write([TokenLogprobs(token, -1.0, ()) for token in prompt], prompt)
    assert found.text_offset[0] == 0
    for token, offset in zip(found.tokens[1:], found.text_offset[1:]):
        assert text[offset:].startswith(token)


def test_a_part_of_a_character_beside_text():
    tokenizer = Bytes()
    tokenizer.token_bytes = [b" a\xe4\n", b"\\\xe4", b"\\", "\ufffd".encode()]
    assert [token_text(tokenizer, token) for token in range(4)] == ["bytes: a\\xe4\\x0a", "bytes:\\x5c\\xe4", "\\", "\ufffd"]
