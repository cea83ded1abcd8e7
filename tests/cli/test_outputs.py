"""Commands check their output paths before any work."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import main
from penstock.cli.demo import NUMBERS, PICTURE
from penstock.cli.outputs import Folder, check_outputs
from penstock.demo.train import DEFAULT, weights_name

WORK = {
    "bench": ["penstock.cli.bench.measure", "penstock.cli.bench.softmax.measure"],
    "check": ["penstock.cli.check.print_compiled", "penstock.cli.check.print_check"],
    "demo": ["penstock.cli.demo.print_check", "penstock.cli.demo.measure", "penstock.cli.demo.train"],
    "profile": ["penstock.cli.profile.inputs", "penstock.cli.profile.profiled"],
    "tune": ["penstock.tune.ahead.check_compiler", "penstock.tune.tune.Tuner.run"],
}
"""Functions that a command must not call before it checks its paths."""
FILES = {
    "bench gla --json": "--json",
    "bench softmax_attention --json": "--json",
    "bench --suite lengths --plot": "--plot",
    "bench --from no-such.json --plot": "--plot",
    "check --compile --record": "--record",
    "profile gla --json": "--json",
    "tune gla --write": "--write",
    "tune gla --dry --write": "--write",
}
FILES_OF_DEMO = NUMBERS, PICTURE, weights_name(DEFAULT)
FOLDERS = {"demo --folder": "--folder", "profile gla --output": "--output"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """A folder with a file, folders, and paths that ``os.access`` reports as not writable, because root can write anywhere."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("folder.png").mkdir()
    Path("locked").mkdir()
    Path("kept").write_text("mine")
    access = os.access
    locked = {str(tmp_path / "locked"), str(tmp_path / "kept")}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in locked and access(path, mode))


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Run a command that must fail before any work; return its output."""

    def run(*words):
        for name in WORK[words[0]]:
            path, _, attribute = name.rpartition(".")
            module = sys.modules.get(path) or sys.modules[path.rpartition(".")[0]].__dict__[path.rpartition(".")[2]]
            monkeypatch.setattr(module, attribute, lambda *_, **__: pytest.fail("work began"))
        before = sorted(tmp_path.rglob("*"))
        done = CliRunner().invoke(main, list(words))
        assert done.exit_code == 2, done.output
        assert sorted(tmp_path.rglob("*")) == before, "nothing is made"
        assert Path("file").read_text() == Path("kept").read_text() == "mine"
        return done.output

    import penstock.tune.tune  # noqa: F401

    return run


@pytest.mark.parametrize("words", FILES)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder.png", ", which is a folder"),
        ("file/a.png", ", where '{}/file' is a file"),
        ("file/new/a.png", ", where '{}/file' is a file"),
        ("locked/a.png", ", where '{}/locked' is not writable"),
        ("locked/new/a.png", ", where '{}/locked' is not writable"),
        ("kept", ", where '{}/kept' is not writable"),
        ("n" * 300 + ".png", ": File name too long"),
    ],
)
def test_unwritable_files_are_refused_before_any_work(refused, words, path, why, tmp_path):
    command, option = words.split()[0], FILES[words]
    wanted = f"{command}: {option} must be a file that can be written, got '{path}'{why.format(tmp_path)}. Name another file.\n"
    assert refused(*words.split(), path) == wanted


@pytest.mark.parametrize("words", FOLDERS)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", ", which is a file"),
        ("file/new", ", where '{}/file' is a file"),
        ("locked", ", where '{}/locked' is not writable"),
        ("locked/new", ", where '{}/locked' is not writable"),
    ],
)
def test_unwritable_folders_are_refused_before_any_work(refused, words, path, why, tmp_path):
    command, option = words.split()[0], FOLDERS[words]
    wanted = f"{command}: {option} must be a folder that can be written, got '{path}'{why.format(tmp_path)}. Name another folder.\n"
    assert refused(*words.split(), path) == wanted


@pytest.mark.parametrize(
    ("words", "name"),
    [*(("demo --folder", name) for name in FILES_OF_DEMO), ("profile gla --output", "profile.png")],
)
def test_folders_with_the_name_of_an_output_file_are_refused(refused, words, name):
    Path("out", name).mkdir(parents=True)
    command, option = words.split()[0], FOLDERS[words]
    said = refused(*words.split(), "out")
    assert (
        said
        == f"{command}: {name} in {option} must be a file that can be written, got 'out/{name}', which is a folder. Name another file.\n"
    )


@pytest.fixture
def profile(monkeypatch):
    """Run ``penstock profile`` on a tiny call; it must end before it measures."""
    monkeypatch.setattr(sys.modules["penstock.cli.profile"], "profiled", lambda *_: pytest.fail("work began"))
    words = ["profile", "gla", "--length", "5", "--heads", "2", "--head-dim", "4", "--device", "cpu", "--impl", "chunkwise"]
    return lambda *more: CliRunner().invoke(main, [*words, *more])


@pytest.mark.parametrize("folder", ["token_loop", "chunkwise"])
def test_trace_folders_that_cannot_be_written_are_refused(profile, monkeypatch, tmp_path, folder):
    Path("out").mkdir()
    Path("out", folder).write_text("mine")
    done = profile("--output", "out")
    assert done.exit_code == 2
    rule = f"profile: {folder} in --output must be a folder that can be written, got 'out/{folder}'"
    assert done.output.endswith(f"{rule}, which is a file. Name another folder.\n")
    Path("out", folder).unlink()
    Path("out", folder).mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != folder and access(path, mode))
    done = profile("--output", "out")
    assert done.exit_code == 2
    assert done.output.endswith(f"{rule}, where '{tmp_path}/out/{folder}' is not writable. Name another folder.\n")


def test_numbers_in_place_of_a_trace_folder_are_refused(profile):
    done = profile("--output", "new", "--json", "new/token_loop")
    assert done.exit_code == 2
    assert "profile: --json must be apart from token_loop in --output, got 'new/token_loop' and 'new/token_loop'" in done.output


def test_numbers_inside_a_trace_folder_are_allowed():
    check_outputs("profile", {"--json": Path("new/token_loop/a.json")}, Folder("--output", Path("new"), (), ("token_loop",)))


def test_broken_links_to_missing_files_are_checked_at_their_target(refused):
    Path("link.png").symlink_to("file/a.png")
    assert "--json must be a file that can be written, got 'link.png', where" in refused("bench", "gla", "--json", "link.png")


def test_two_names_of_one_file_are_refused(refused):
    Path("link.png").symlink_to("a.png")
    assert "--json must be apart from --plot" in refused("bench", "gla", "--json", "link.png", "--plot", "a.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench gla --json a.png --plot ./a.png", "bench: --json must be apart from --plot, got 'a.png' and 'a.png'"),
        ("bench gla --json new --plot new/a.png", "bench: --json must be apart from --plot, got 'new' and 'new/a.png'"),
        ("bench gla --json new/a --plot new", "bench: --json must be apart from --plot, got 'new/a' and 'new'"),
        ("profile gla --json new --output new", "profile: --json must be apart from profile.png in --output"),
        ("profile gla --json new/profile.png --output new", "profile: --json must be apart from profile.png in --output"),
    ],
)
def test_conflicting_outputs_are_refused(refused, words, said):
    assert said in refused(*words.split())


def test_every_broken_path_is_named(refused):
    said = refused("bench", "gla", "--json", "folder.png", "--plot", "file/a.png")
    assert said.count("must be a file that can be written") == 2


def test_existing_files_are_overwritten():
    words = ["bench", "gla", "--shape", "1,5,2,4", "--seconds", "0.002", "--threads", "1", "--json", "file"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert Path("file").read_text().startswith("{")
