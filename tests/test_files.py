"""Text of users is read in one way, whichever command reads it; files that are written have the mode of the umask."""

import ast
import io
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock.cli import main
from penstock.errors import PenstockWarning, RangeError
from penstock.files import read_text, usual_mode
from penstock.models import CausalLM, gla, save
from penstock.models.tokenizers import Bytes

TEXTS = {
    "carriage returns": b"a\r\nb\rc\n\r\n",
    "separators of Unicode": "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg\x1dh\x1e".encode(),
    "NUL and controls": bytes(range(128)),
    "characters": "é 世界 \U0001f600 \ufeff e\u0301".encode(),
}
SOURCES = sorted(Path(penstock.__file__).parent.rglob("*.py"))


def trained_on(file, folder):
    """Tokens of a corpus of ``penstock train``."""
    pytest.importorskip("numpy")
    from penstock.training.data import read

    return list(read([file], Bytes()).tokens)


def _given(monkeypatch, folder, *words, text=None):
    """What ``generate`` or ``eval`` give to the model."""
    torch.manual_seed(0)
    if not (folder / "model").exists():
        save(CausalLM(gla(vocab_size=256, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)), folder / "model")
    seen = []
    monkeypatch.setattr(sys.modules["penstock.cli.generate"], "stream", lambda model, prompt, *_, **__: iter(seen.extend(prompt) or ()))
    score = sys.modules["penstock.training.scoring"].score
    monkeypatch.setattr(
        sys.modules["penstock.training.scoring"],
        "score",
        lambda model, tokens, window: seen.extend(tokens[0]) or score(model, tokens, window),
    )
    done = CliRunner().invoke(main, [*words, "--model", str(folder / "model"), "--device", "cpu", "--threads", "1"], input=text)
    return seen, done


def _said(done):
    """Raise, or warn of, what a command printed."""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise RangeError(done.stderr)
    for line in done.stderr.splitlines():
        if line.startswith("Warning: "):
            warnings.warn(line, PenstockWarning, stacklevel=2)


def prompted(file, folder):
    with pytest.MonkeyPatch.context() as patch:
        seen, done = _given(patch, folder, "generate", "--prompt-file", str(file))
    _said(done)
    return seen


def piped(file, folder):
    with pytest.MonkeyPatch.context() as patch:
        seen, done = _given(patch, folder, "generate", "--prompt-file", "-", text=file.read_bytes())
    _said(done)
    return seen


def scored(file, folder):
    with pytest.MonkeyPatch.context() as patch:
        seen, done = _given(patch, folder, "eval", "--task", "perplexity", "--text", str(file))
    _said(done)
    assert f"of {len(file.read_bytes()) - 1:,} bytes" in done.output  # the first byte has nothing before it
    return seen


READERS = [trained_on, prompted, piped, scored]
"""From a file to the tokens of bytes that a command uses."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_of_a_text_is_used(reader, text, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXTS[text])
    assert bytes(reader(tmp_path / "a.txt", tmp_path)) == TEXTS[text]


@pytest.mark.parametrize("reader", READERS)
def test_a_byte_order_mark_is_kept_with_a_warning(reader, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    with pytest.warns(PenstockWarning, match="begins with a byte-order mark, which is read as a character of the text"):
        assert bytes(reader(tmp_path / "a.txt", tmp_path)) == b"\xef\xbb\xbftext"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"one\ntw\xe9\n", "(byte 0xe9 at 6, in line 2: invalid continuation byte). Convert it: iconv -f ENCODING -t UTF-8 FILE > NEW."),
        ("text".encode("utf-16"), "(byte 0xff at 0, in line 1: invalid start byte). Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW."),
    ],
)
def test_bytes_that_are_not_utf_8_are_refused(reader, content, said, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(RangeError, match="must be a text file in UTF-8") as error:
        reader(tmp_path / "a.txt", tmp_path)
    assert said in str(error.value)


def test_a_file_that_is_missing_is_named():
    with pytest.raises(RangeError, match=r"f: text must be a text file in UTF-8, got 'nowhere' \(No such file or directory\)"):
        read_text(Path("nowhere"), "f", "text")


def test_standard_input_is_read_as_a_file_is(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\n"), "ascii"))
    assert read_text(Path("-"), "f", "text") == "a\r\n"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(SOURCES[0].parent)))
def test_files_are_read_and_written_in_utf_8(file):
    """Not in the encoding of the user's locale."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "write_text"):
            needed = 1 if node.func.attr == "read_text" else 2
            assert len(node.args) >= needed or any(one.arg == "encoding" for one in node.keywords), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            assert any("b" in ast.unparse(one) for one in node.args[1:]), f"line {node.lineno}"


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000])
def test_the_usual_mode_is_that_of_the_umask(tmp_path, mask):
    file = tmp_path / "a"
    file.write_bytes(b"")
    file.chmod(0o600)
    before = os.umask(mask)
    try:
        usual_mode(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    assert list(tmp_path.iterdir()) == [file]
