"""Tokenizers: round trips, streams, agreement with other packages, and which one a checkpoint gets."""

import json
import random
import sys
from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_files import SAMPLES, streamed, written

from penstock import DtypeError, RangeError
from penstock.errors import MissingExtra
from penstock.models import CausalLM, rwkv6, save
from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import WORLD_VOCAB, Bytes, World, load_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    return written(tmp_path_factory.mktemp("tokenizers"), SAMPLES)


@pytest.fixture(scope="module")
def tokenizers(world, tokenizer_files):
    return [Bytes(), Bytes(257), world, *map(HuggingFace, tokenizer_files.values())]


@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_every_text_survives_the_round_trip(tokenizers, text):
    for tokenizer in tokenizers:
        tokens = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        wanted = text.removeprefix(" ") if tokenizer is tokenizers[-1] else text  # Metaspace adds no space to one, and decoding removes it
        assert tokenizer.decode(tokens) == wanted
        assert "".join(streamed(tokenizer, tokens)) == wanted


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_stream_of_any_tokens_equals_the_whole(tokenizers, data):
    for tokenizer in tokenizers:
        tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
        assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def known_tokens(tokenizers):
    """Of each tokenizer: those with known bytes."""
    return [[token for token, value in enumerate(tokenizer.token_bytes) if value is not None] for tokenizer in tokenizers]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_known_bytes_of_tokens_are_those_of_their_text(tokenizers, known_tokens, data):
    for tokenizer, known in zip(tokenizers, known_tokens):
        tokens = data.draw(st.lists(st.sampled_from(known), max_size=20))
        joined = b"".join(tokenizer.token_bytes[token] for token in tokens).decode(errors="replace")
        text = tokenizer.decode(tokens)
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size
        if len(known) == tokenizer.vocab_size:
            assert text == joined
        elif "\ufffd" not in joined:  # a byte fallback writes one for each byte
            assert text == joined.removeprefix(" ")


def test_characters_of_byte_level_tokens_stand_for_the_bytes_that_tokenizers_reads(tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    text = "".join(map(chr, [*range(0x250), *range(0x7F0, 0x810), 0xD7FF, 0xFFFF, 0x10000, 0x40000, 0x80000, 0xC0000, 0x10FFFF]))
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken("é ü"), AddedToken("世")])
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    assert [tokenizer.token_bytes[token] for token in tokenizer.encode(text)] == [bytes([byte]) for byte in text.encode()]
    assert {*tokenizer.token_bytes[:256]} == {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_bytes[256:] == ["é ü".encode(), "世".encode(), b""]


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=24))
def test_bytes_decode_as_python_decodes_them(data):
    assert Bytes().decode(data) == data.decode(errors="replace")
    text = ""
    for i, piece in enumerate(streamed(Bytes(), data)[:-1]):
        text += piece
        whole = data[: i + 1].decode(errors="replace")
        assert whole in (text, text + "\ufffd", text + "\ufffd\ufffd")  # one character is pending; CPython also waits after ED A0


def test_partial_characters_wait_for_their_last_byte(world):
    smile = "😀".encode()
    assert streamed(Bytes(), smile) == ["", "", "", "😀", ""]
    assert streamed(Bytes(), smile[:3]) == ["", "", "", "\ufffd"]
    assert streamed(Bytes(), [*smile[:2], 65]) == ["", "", "\ufffdA", ""]  # invalid only when the third byte is there
    assert streamed(Bytes(), [255, 65]) == ["\ufffd", "A", ""]  # 255 begins no character
    assert streamed(world, [byte + 1 for byte in smile]) == ["", "", "", "😀", ""]


def test_partial_characters_of_hugging_face_tokenizers_wait(tokenizers):
    for tokenizer in tokenizers[3:]:
        tokens = tokenizer.encode("a😀b𝄞")
        pieces = streamed(tokenizer, tokens)
        assert "".join(pieces) == "a😀b𝄞"
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_run_of_bytes_is_decoded_as_a_whole(tokenizers):
    """One invalid byte changes the text of the whole run, and tokens without a text do not end it."""
    tokenizer = tokenizers[4]
    first, second, invalid, (a,) = 0xC4, 0xAA, 0x100, tokenizer.encode("ba")[-1:]  # tokens of bytes are one more than the byte
    for tokens, pieces in (
        ([first, second, a], ["", "", "éa", ""]),
        ([first, second, first, second], ["", "", "", "", "éé"]),
        ([first, 0, second, 0, a], ["", "", "", "", "éa", ""]),
        ([first, second, invalid, a, invalid], ["", "", "", "\ufffd\ufffd\ufffda", "", "\ufffd"]),
        ([a, first, second, a], ["a", "", "", "éa", ""]),
    ):
        assert streamed(tokenizer, tokens) == pieces
        assert "".join(pieces) == tokenizer.decode(tokens)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_stream_of_bytes_of_text_and_others_equals_the_whole(tokenizers, data):
    tokenizer = tokenizers[4]
    parts = st.one_of(st.text("aé😀 ", max_size=4).map(tokenizer.encode), st.lists(st.sampled_from([0, 0xC4, 0xAA, 0x100]), max_size=2))
    tokens = list(chain(*data.draw(st.lists(parts, max_size=6))))
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


@settings(deadline=None, max_examples=200)
@given(text=st.text("aé😀 the\n", max_size=24))
@example("the a the")
@example("é 😀 a")
@example(" the")
def test_a_stream_continues_the_text_before_it(tokenizers, text):
    """From every token on, without the spaces that are removed from the begin of a text only."""
    for tokenizer in tokenizers:
        tokens = tokenizer.encode(text)
        whole = tokenizer.decode(tokens)
        for n in range(len(tokens) + 1):
            before = tokenizer.decode(tokens[:n])
            if "\ufffd" not in before:
                assert before + "".join(streamed(tokenizer, tokens[n:], tokens[:n])) == whole, n


def test_files_that_cut_or_fill_texts_encode_whole_ones(tokenizer_files, tmp_path):
    """Programs that made batches leave these settings in their files."""
    from tokenizers import Tokenizer

    for name, file in tokenizer_files.items():
        made = Tokenizer.from_file(str(file))
        made.enable_truncation(3)
        made.enable_padding(length=99, pad_id=0)
        made.save(str(tmp_path / f"{name}.json"))
        plain, tokenizer = HuggingFace(file), HuggingFace(tmp_path / f"{name}.json")
        for text in "", "a", "the cat sat on the mat":
            assert tokenizer.encode(text) == plain.encode(text)
            assert tokenizer.encode(text, after=[1]) == plain.encode(text, after=[1])
            assert tokenizer.encode(text, special=True) == plain.encode(text, special=True)
        assert tokenizer.with_texts(["<end>"]).encode("the cat sat on the mat") == plain.encode("the cat sat on the mat")


def test_special_tokens_in_the_middle_of_a_text_are_refused(tokenizers):
    for tokenizer in tokenizers:
        with pytest.raises(RangeError, match="encode: special must be False for a text that continues tokens, got True"):
            tokenizer.encode("a", special=True, after=[97])


def test_tokens_without_a_text_take_no_time(tokenizers):
    """Ends of texts that are ignored do not make later tokens slower."""
    for tokenizer in tokenizers[3:]:
        stream = tokenizer.stream()
        assert not any(stream.push(0) for _ in range(2000))
        assert not stream._tokens


def multilingual(size, seed):
    """A text of words of many scripts and of random characters, in UTF-8 of about ``size`` bytes."""
    draw, parts, length = random.Random(seed), [], 0
    while length < size:
        if draw.random() < 0.7:
            sample = draw.choice(SAMPLES)
            begin = draw.randrange(len(sample))
            part = sample[begin : begin + draw.randrange(1, 30)]
        else:
            part = "".join(
                chr(draw.choice([draw.randrange(128), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(5)
            )
        parts.append(part)
        length += len(part.encode())
    return "".join(parts)


def check_against_rwkv(world, size):
    from pathlib import Path

    rwkv = pytest.importorskip("rwkv.rwkv_tokenizer")
    judge = rwkv.TRIE_TOKENIZER(str(Path(rwkv.__file__).with_name("rwkv_vocab_v20230424.txt")))
    for begin in range(0, size, 100_000):
        text = multilingual(min(size, 100_000), seed=begin)
        tokens = world.encode(text)
        assert tokens == judge.encode(text)
        assert world.decode(tokens) == text
    assert all(world.stream()._values[token] == value for token, value in judge.idx2token.items())


def test_world_agrees_with_the_rwkv_package(world):
    check_against_rwkv(world, 20_000)


@pytest.mark.slow
def test_world_agrees_with_the_rwkv_package_on_10_megabytes(world):
    check_against_rwkv(world, 10_000_000)


def test_sizes_and_ends(world, tokenizers):
    assert (world.vocab_size, world.end_of_text, world.decode([0])) == (65530, 0, "")
    assert [(one.vocab_size, one.end_of_text) for one in tokenizers[:2]] == [(256, None), (257, 256)]
    assert Bytes(257).decode([97, 256, 98]) == "ab"
    for tokenizer in tokenizers[3:]:
        assert tokenizer.end_of_text == 0
        assert tokenizer.decode([0]) == ""


def test_a_panic_of_the_package_is_an_error(tokenizer_files):
    """It is no Exception: it would end the thread of an engine."""

    class PanicException(BaseException):
        pass

    class Panics:
        def __getattr__(self, name):
            raise PanicException("index out of bounds")

    tokenizer = HuggingFace(tokenizer_files["bytes"])
    tokenizer._rust = tokenizer._continued._rust = Panics()
    calls = {
        "encode: text": [lambda: tokenizer.encode("a"), lambda: tokenizer.encode("a", after=[3])],
        "decode: tokens": [lambda: tokenizer.decode([3]), lambda: tokenizer.stream([3]), lambda: tokenizer.stream().push(3)],
    }
    for argument, functions in calls.items():
        for function in functions:
            with pytest.raises(RangeError, match=rf"^{argument} must be .*, got a panic of it \(index out of bounds\)\."):
                function()


def test_special_tokens_are_added_if_asked_for(tokenizer_files, tmp_path):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(tokenizer_files["bytes"]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("ab", special=True) == [0, *ours.encode("ab")]
    assert ours.end_of_text is None  # no other file names one
    assert (ours.special_tokens, ours.with_texts({"<end>"}).special_tokens) == ({"<end>": 0}, {})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))
    found = load_tokenizer(tmp_path)
    assert (found.end_of_text, found.ends) == (3, {3, 0})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))  # as of a chat beside its base model
    found = load_tokenizer(tmp_path)
    assert (found.end_of_text, found.ends) == (3, {3, 0, *ours.encode("a")})
    (tmp_path / "tokenizer_config.json").unlink()
    for content in ('{"eos_token_id": true}', '{"eos_token_id": [[3]]}', '{"eos_token_id": -1}', "[3]", "{", '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(content)
        assert load_tokenizer(tmp_path).end_of_text is None
    for content in ('{"eos_token": "\\ud800"}', '{"eos_token": {"content": 3}}', '{"eos_token": "no token"}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert load_tokenizer(tmp_path).end_of_text is None


def model_of(vocab_size):
    return CausalLM(rwkv6(vocab_size=vocab_size, hidden_size=8, num_layers=1, intermediate_size=8, head_size=8, mix_rank=1, decay_rank=1))


def test_a_checkpoint_gets_its_tokenizer(tmp_path, tokenizer_files):
    def kind(path):
        return type(load_tokenizer(path)).__name__

    sizes = {"world": 65536, "bytes": 256, "other": 400}
    for name, size in sizes.items():
        save(model_of(size), tmp_path / f"{name}.pth", "blinkdl")
    for layout in ("penstock", "fla", "hf"):
        save(model_of(257), tmp_path / layout, layout)
        assert load_tokenizer(tmp_path / layout).vocab_size == 257
        assert load_tokenizer(tmp_path / layout / "model.safetensors").end_of_text == 256
    assert [kind(tmp_path / name) for name in ("world.pth", "bytes.pth")] == ["World", "Bytes"]
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_files["bytes"].read_bytes())
    assert [kind(tmp_path / name) for name in ("world.pth", "other.pth", "tokenizer.json", "")] == ["World", *["HuggingFace"] * 3]

    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 65536}))
    assert kind(folder) == "World"
    (folder / WORLD_VOCAB).write_text("1 'a' 1\n2 'b' 1\n3 'ab' 2\n")
    assert load_tokenizer(folder).encode("aab") == [1, 3]


def test_errors_say_what_to_do(tmp_path, world, tokenizer_files):
    with pytest.raises(RangeError, match=r"load_tokenizer: path must be an existing file or folder, got .*nowhere', which does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    save(model_of(300), tmp_path / "pile.pth", "blinkdl")
    for path in (tmp_path / "pile.pth", tmp_path):
        with pytest.raises(RangeError, match=r"Put the tokenizer\.json of the model in"):
            load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RangeError, match=r"HuggingFace: file must be a tokenizer\.json that tokenizers reads"):
        load_tokenizer(tmp_path)
    for line in (
        "",
        "1 5 1",
        "-3 'a' 1",
        "0 'a' 1",
        "65530 'a' 1",
        "1 ['a'] 1",
        "1 'a' 2",
        "1 'a'",
        "1 '' 0",
        "1 " + "-" * 200_000 + "1 1",
    ):
        (tmp_path / "vocab.txt").write_text(f"{line}\n")
        with pytest.raises(RangeError, match="World: file must be a vocabulary of RWKV World"):
            World(tmp_path / "vocab.txt")
    for tokenizer in (Bytes(), world, HuggingFace(tokenizer_files["bytes"])):
        with pytest.raises(RangeError, match="text must be free of lone surrogates"):
            tokenizer.encode("a\ud800")
        with pytest.raises(DtypeError, match="encode: text must be a str, got None"):
            tokenizer.encode(None)
        for token in (-1, tokenizer.vocab_size):
            with pytest.raises(RangeError, match=f"decode: token must be from 0 to {tokenizer.vocab_size - 1}, got {token}"):
                tokenizer.decode([token])
    with pytest.raises(RangeError, match="vocab_size must be 256, or 257"):
        Bytes(300)


@pytest.mark.parametrize(
    ("module", "make", "extra"), [("pyrwkv_tokenizer", World, "pyrwkv-tokenizer"), ("tokenizers", lambda: HuggingFace("a"), "tokenizers")]
)
def test_a_missing_package_names_its_extra(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{extra} must be installed, got none\. Run pip install -e '\.\[models\]'"):
        make()


def test_tokens_may_be_tensors(tokenizers):
    for tokenizer in tokenizers:
        tokens = tokenizer.encode("a é")
        assert "".join(streamed(tokenizer, torch.tensor(tokens))) == "a é"


@pytest.mark.parametrize("token", [1.5, "a", None])
def test_tokens_of_other_types_are_refused(token):
    with pytest.raises(DtypeError, match="decode: token must be a whole number, got"):
        Bytes().decode([token])
