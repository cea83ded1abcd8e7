"""Training data: files to documents, documents to samples."""

import re

import numpy
import pytest
import torch

from penstock import RangeError
from penstock.models.tokenizers import Bytes
from penstock.training.data import IGNORED, Corpus, Windows, collate, find_files, read

ENDING = Bytes(257)


def test_text_files_become_documents(tmp_path):
    (tmp_path / "a.txt").write_text("ab--c--")
    (tmp_path / "b.txt").write_text("dé")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    whole = read(files, Bytes())
    assert whole.tokens.tolist() == list(b"ab--c--d\xc3\xa9")
    assert whole.begins.tolist() == [0, 7]
    parts = read(files, ENDING, "--")
    assert parts.tokens.tolist() == [*b"ab", 256, *b"c", 256, *b"d\xc3\xa9", 256]
    assert parts.begins.tolist() == [0, 3, 5]


def test_lines_of_json_become_documents(tmp_path):
    more = '{"id": {"text": 1, "text": [{"text": 2}]}, "text": "\u2028"}'
    (tmp_path / "a.jsonl").write_bytes(f'{{"text": "ab\\n--é"}}\r\n\n{more}\n{{"text": ""}}\n'.encode())
    corpus = read([tmp_path / "a.jsonl"], ENDING)
    assert corpus.tokens.tolist() == [*"ab\n--é".encode(), 256, *"\u2028".encode(), 256]
    assert corpus.begins.tolist() == [0, 8]
    assert read([tmp_path / "a.jsonl"], ENDING, "--").begins.tolist() == [0, 8]
    (tmp_path / "A.JSONL").write_bytes((tmp_path / "a.jsonl").read_bytes())
    assert read([tmp_path / "A.JSONL"], ENDING).begins.tolist() == [0, 8]
    (tmp_path / "b.txt").write_text("c--d")
    assert read([tmp_path / "b.txt", tmp_path / "a.jsonl"], ENDING, "--").begins.tolist() == [0, 2, 4, 12]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("text", "line 2: Expecting value at character 0"),
        ('{"text": "a"', "line 2: Expecting ',' delimiter at character 12"),
        ('{"body": "a"}', "line 2: no such string in {'body': 'a'}"),
        ('{"text": ["a"]}', "line 2: no such string in {'text': ['a']}"),
        ('["text"]', r"line 2: no such string in ['text']"),
        ('{"text": "\\ud800"}', "line 2: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"),
        ('{"text": "a", "id": 1, "text": "b"}', 'line 2: "text" is there several times'),
        ("[" * 100_000, "line 2: maximum recursion depth exceeded"),
    ],
)
def test_wrong_lines_of_json_are_named(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    wanted = f'data must be lines of JSON, objects with a string "text", got {str(tmp_path / "a.jsonl")!r} ({reason}'
    with pytest.raises(RangeError, match=re.escape(wanted)):
        read([tmp_path / "a.jsonl"], Bytes())


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_token_files_are_mapped(tmp_path, name):
    tokens = numpy.array([1, 2, 256, 3, 256, 4, 256], dtype=numpy.uint16)
    numpy.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    corpus = read([tmp_path / name], ENDING)
    assert isinstance(corpus.tokens, numpy.memmap)
    assert corpus.tokens.tolist() == tokens.tolist()
    assert corpus.begins.tolist() == [0, 3, 5]
    twice = read([tmp_path / name] * 2, ENDING)
    assert twice.begins.tolist() == [0, 3, 5, 7, 10, 12]
    with pytest.raises(RangeError, match=r"train: data must be tokens from 0 to 255, got .*\(256\)\. Use the tokenizer"):
        read([tmp_path / name], Bytes())


def test_windows_hold_every_prediction_once():
    corpus = Corpus(numpy.arange(23, dtype=numpy.uint16), torch.tensor([0]))
    samples = list(Windows(corpus, 4))
    assert len(samples) == 5
    assert torch.cat([sample["ids"] for sample in samples]).tolist() == list(range(20))
    assert all(torch.equal(sample["labels"], sample["ids"] + 1) for sample in samples)
    batch = collate(samples[:3])
    assert batch["ids"].shape == batch["labels"].shape == (3, 4)
    assert len(Windows(Corpus(numpy.arange(9), torch.tensor([0])), 8)) == 1


def test_packed_samples_start_a_sequence_at_each_document():
    begins = [0, 3, 8, 9, 12]
    corpus = Corpus(numpy.arange(17), torch.tensor(begins))
    samples = list(Windows(corpus, 4, packed=True))
    assert [sample["begins"].tolist() for sample in samples] == [[0, 3], [0], [0, 1], [0]]
    batch = collate(samples)
    assert batch["ids"].tolist() == [list(range(16))]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 8, 9, 12, 16]
    labels = batch["labels"][0].tolist()
    # the last token of a document does not predict the first of the next, also at a window's border
    assert labels == [IGNORED if t + 1 in begins else t + 1 for t in range(16)]


def test_wrong_files_raise(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(RangeError, match=r"train: data must be a text file in UTF-8, got .*a\.txt"):
        read([tmp_path / "a.txt"], Bytes())
    with pytest.raises(RangeError, match=r"train: data\.evaluation must be a text file in UTF-8, got .*a\.txt"):
        read([tmp_path / "a.txt"], Bytes(), argument="data.evaluation")
    numpy.save(tmp_path / "a.npy", numpy.zeros((2, 2)))
    with pytest.raises(RangeError, match=r"data must be a row of integers, got .*float64 of shape \[2, 2\]"):
        read([tmp_path / "a.npy"], Bytes())
    (tmp_path / "b.npy").write_text("no array")
    with pytest.raises(RangeError, match="data must be a file of tokens"):
        read([tmp_path / "b.npy"], Bytes())
    with (tmp_path / "b.npy").open("wb") as file:
        numpy.savez(file, a=numpy.arange(3))
    with pytest.raises(RangeError, match=r"data must be a file of tokens, got .*b\.npy' \(an archive of arrays.*Save one array"):
        read([tmp_path / "b.npy"], Bytes())
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(RangeError, match="data must be files with tokens"):
        read([tmp_path / "empty.txt"], Bytes())
    with pytest.raises(RangeError, match=r"data must be at least length \+ 1 = 9 tokens, got 8 tokens"):
        Windows(Corpus(numpy.arange(8), torch.tensor([0])), 8)


def test_a_separator_of_other_line_ends_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo")
    with pytest.raises(RangeError, match=r"separator '\\n\\n', got .* \(which has '\\r\\n\\r\\n'\)\..*take '\\r\\n\\r\\n'"):
        read([tmp_path / "a.txt"], Bytes(), "\n\n")
    assert read([tmp_path / "a.txt"], Bytes(), "\r\n\r\n").begins.tolist() == [0, 3]


def test_a_separator_that_no_text_has_is_refused(tmp_path):
    for name, text in (("a.txt", "one document"), ("b.txt", "another"), ("c.txt", "one that ends with it--")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    with pytest.raises(RangeError, match=r"data must be text with the separator '--', got .*a\.txt' \(which does not .*\)\. Leave out"):
        read([a], Bytes(), "--")
    with pytest.raises(RangeError, match=r"data\.train must be text .*a\.txt' \(none of 2 text files has it\)"):
        read([a, b], Bytes(), "--", argument="data.train")
    assert len(read([c], Bytes(), "--").begins) == 1
    assert len(read([a, b, c], Bytes(), "--").begins) == 3
    numpy.save(tmp_path / "a.npy", numpy.arange(3))
    assert read([tmp_path / "a.npy"], Bytes(), "--").tokens.tolist() == [0, 1, 2]


def test_files_are_found_by_patterns(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([f"{tmp_path}/**/*.txt"], "train", "data.train")
    assert [file.name for file in found] == ["a.txt", "b.txt", "c.txt"]
    with pytest.raises(RangeError, match=r"train: data\.train must be files that exist, or patterns of them, got '.*nothing'"):
        find_files([str(tmp_path / "nothing")], "train", "data.train")
