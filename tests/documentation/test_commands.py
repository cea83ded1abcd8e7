"""Commands in the documents: options that there are, files that there are, extras and targets that there are."""

import re
import shlex

import pytest
from documents import ROOT, blocks
from typer.main import get_command

from penstock.cli import main
from penstock.errors import DISTRIBUTION

OTHERS = {
    "/opt/penstock/bin/pip", "caddy", "curl", "do", "docker", "done", "export", "for", "haproxy", "hf", "install", "journalctl", "openssl",
    "python3", "systemctl", "tensorboard", "useradd",
}  # fmt: skip
"""Programs of others, and words of the shell."""
BLOCKS = list(blocks("sh", "bash"))


def commands(text):
    """The commands of a block, as lists of words."""
    for line in re.sub(r"\$\(\(.*?\)\)", "8001", text.replace("\\\n", " ")).splitlines():
        for part in re.split(r"\s&&\s|\s\|\s|;\s", line.split(" # ")[0] if not line.lstrip().startswith("#") else ""):
            words = shlex.split(part.strip().removesuffix("&"))
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


def check_penstock(words):
    """Raise for options and values that a command does not take. Nothing runs."""
    if words and not words[0].startswith("-"):
        command = get_command(main).commands[words[0]]
        command.make_context(words[0], list(words[1:]))


def check_pip(words):
    extras = [one for word in words for found in re.findall(r"\[([\w,]+)\]", word) for one in found.split(",")]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(f"\n{one} = [" in text for one in extras)
    assert not {"penstock", DISTRIBUTION} & {word.partition("[")[0] for word in words}, "there is no release: a checkout or a wheel"
    constraints = [word for word in words if word.startswith("constraints")]
    assert all((ROOT / one).exists() for one in constraints)


def check_python(words):
    if "-m" in words:
        module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if module == "penstock":
            check_penstock(rest)
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists() or (ROOT / module).is_dir() or module in ("pytest", "venv")
    else:
        program = next(word for word in words if word.endswith(".py"))
        assert (ROOT / program).exists()


def check_make(words):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert all(one in targets for one in words if "=" not in one)


CHECKS = {"penstock": check_penstock, "pip": check_pip, "python": check_python, "torchrun": check_python, "make": check_make}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_are_as_written(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(block.text):
        assert words[0] in CHECKS or words[0] in OTHERS, words
        CHECKS.get(words[0], lambda rest: None)(words[1:])


def test_blocks_are_found():
    assert len(BLOCKS) > 25
    assert sum(words[0] == "penstock" for block in BLOCKS for words in commands(block.text)) > 30


@pytest.mark.parametrize("text", ["penstock generate --modle a.pth", "penstock serve --model a --port x", "penstock fly"])
def test_wrong_commands_are_found(text):
    with pytest.raises(Exception, match=r"modle|integer|fly"):
        check_penstock(shlex.split(text)[1:])


def test_wrong_extras_and_targets_are_found():
    for check, words in (
        (check_pip, ["install", "-e", ".[nothing]"]),
        (check_pip, ["install", "penstock[serve]"]),
        (check_pip, ["install", f"{DISTRIBUTION}[serve]"]),
        (check_make, ["nothing"]),
    ):
        with pytest.raises(AssertionError):
            check(words)
