"""Tokens of texts that continue others: those of the whole text, whatever a file adds to the begin of a text."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_files import SAMPLES, streamed, written

from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import Bytes, World, text_after


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tokenizers"), SAMPLES)


@pytest.fixture(scope="module")
def tokenizers(tokenizer_files):
    return [Bytes(), Bytes(257), World(), *map(HuggingFace, tokenizer_files.values())]


@settings(deadline=None, max_examples=200)
@given(before=st.text("aé😀 the\n▁", min_size=1, max_size=12), text=st.text("aé😀 the\n▁", max_size=12))
@example("the", "the")
@example("the", " the")
@example("a", "")
@example("😀", "😀")
def test_a_text_that_continues_tokens_gets_no_space_before_it(tokenizers, before, text):
    for tokenizer in tokenizers:
        tokens = tokenizer.encode(before)
        more = tokenizer.encode(text, after=tokens)
        whole = (before + text).replace("▁", " ") if tokenizer in tokenizers[4:] else before + text
        whole = whole.removeprefix(" ") if tokenizer is tokenizers[-1] else whole
        assert tokenizer.decode([*tokens, *more]) == whole
        assert text_after(tokenizer, more, tokens) == whole[len(tokenizer.decode(tokens)) :]


SPACES = {
    "first": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}},
    "always": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}},
    "never": {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}},
    "normalizer alone": {"normalizer": {"type": "Prepend", "prepend": "▁"}, "pre_tokenizer": None},
    "among others": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]},
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}],
        },
    },
    "after a split": {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}],
        },
    },
    "nested": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}]}]},
    },
    "stripped": {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Strip", "strip_left": True, "strip_right": False}, {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
    },
}  # fmt: skip
"""Ways to add a space to the begin of a text, of some also after added tokens."""


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("name", ["bytes", "fallback", "metaspace"])
def test_the_text_after_an_added_token_has_the_tokens_of_the_whole(tokenizer_files, tmp_path, name, kind):
    content = json.loads(tokenizer_files[name].read_text("utf-8")) | SPACES[kind]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    for before in "the<end>", "<end>", " a\n<end>", "<end><end>":
        tokens = tokenizer.encode(before)
        for text in "the", " the", "", "\n\na 1é", "<end>", "<end>the", "a<end>a <end> the", " <end>":
            assert [*tokens, *tokenizer.encode(text, after=tokens)] == tokenizer.encode(before + text), (before, text)
    for text in "the", "a<end>a <end> the", "<end>a":  # after another text, only its begin differs
        tokens, (middle,) = tokenizer.encode(text), tokenizer.encode("ba")[-1:]
        found = tokenizer.encode(text, after=[middle])
        size = len(tokenizer.encode(text.partition("<end>")[2]))
        assert size == 0 or found[-size:] == tokens[-size:]
        assert tokenizer._rust.decode([middle, *found], skip_special_tokens=False).startswith(f"a{text[:5]}")


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("name", ["bytes", "fallback", "metaspace"])
def test_a_text_that_continues_words_has_the_tokens_of_the_whole(tokenizer_files, tmp_path, name, kind, normalized):
    """Also where added tokens are white space, or are found in the normalized text."""
    from tokenizers import AddedToken, Tokenizer

    content = json.loads(tokenizer_files[name].read_text("utf-8")) | SPACES[kind]
    if normalized and "Prepend" in str(content["normalizer"]):
        pytest.skip("the package finds such tokens only after the space that is added to them, too")
    made = Tokenizer.from_str(json.dumps(content))
    made.add_tokens([AddedToken(text, normalized=normalized) for text in ("\n\n", "  ", "[x]")])
    made.add_tokens([AddedToken("[r]", normalized=normalized, rstrip=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    for before in "b", "the a", "[x]", "b[x]", "b\n\n", "b<end>":
        tokens = tokenizer.encode(before)
        for text in " a", " a the", " the  a\n\nthe[x]b", "[x]", "[x]a the", "\n\nthe", " a<end>a  [X]":
            whole = tokenizer.encode(before + text)
            assert [*tokens, *tokenizer.encode(text, after=tokens)] == whole, (before, text)
    tokens = tokenizer.encode("b[r]")  # as <|end|> in files of Phi-3
    for text in "", "a", " a", "\n", " \na  a[x]", "\x1ca", " \x1f\u3000\x85a", "\x85\u3000 a":
        assert [*tokens, *tokenizer.encode(text, after=tokens)] == tokenizer.encode(f"b[r]{text}"), text


def test_a_space_that_is_added_before_the_search_is_not_added_after_a_token_that_was_found(tokenizer_files, tmp_path):
    """As in files of Llama 2, whose added tokens are looked for in the normalized text."""
    content = json.loads(tokenizer_files["fallback"].read_text("utf-8"))
    content["added_tokens"][0]["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    for before, text in ("<end>", "the"), ("<end>", " the"), ("a <end>", "the <end>a"):
        tokens = tokenizer.encode(before)
        whole = tokenizer.encode(before + text)
        assert tokens[-1] == 0
        assert [*tokens, *tokenizer.encode(text, after=tokens)] == whole
        assert tokenizer.decode(whole) == "".join(streamed(tokenizer, whole))
        assert "<end>" not in tokenizer.decode(whole)


def test_each_piece_after_the_first_keeps_its_space(tokenizer_files, tmp_path):
    content = json.loads(tokenizer_files["metaspace"].read_text("utf-8")) | SPACES["after a split"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    tokens = tokenizer.encode("the")
    for text, wanted in ("a b  c", "thea b c"), (" a b", "the a b"), ("\na", "the a"), ("", "the"), (" ", "the"), ("a", "thea"):
        assert tokenizer.decode([*tokens, *tokenizer.encode(text, after=tokens)]) == wanted
