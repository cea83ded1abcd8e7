"""The programs of examples/ run, and find what their texts say."""

import importlib.util
import sys

import pytest
from documents import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PICTURES = ROOT / "docs" / "images" / "examples"


def run(name, folder, monkeypatch, *words):
    """The result of a program's main, which has drawn its picture."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [name, "--plot", str(folder / "picture.png"), *words])
    found = module.main()
    assert (folder / "picture.png").stat().st_size > 5000
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_in_the_gallery(path):
    gallery = (ROOT / "docs/examples/index.md").read_text("utf-8")
    assert f"../../examples/{path.name}" in gallery
    assert f"../images/examples/{path.stem}.png" in gallery
    assert (PICTURES / f"{path.stem}.png").exists()


@pytest.mark.slow
def test_gates(tmp_path, monkeypatch):
    found = run("gates", tmp_path, monkeypatch, "--length", "128")
    assert all(error < 2e-6 for rows in found.values() for error, _ in rows)


@pytest.mark.slow
def test_reversal(tmp_path, monkeypatch):
    found = run("reversal", tmp_path, monkeypatch, "--digits", "2", "--steps", "100")
    assert found["rwkv7"][-1] > 0.3


@pytest.mark.slow
def test_states(tmp_path, monkeypatch):
    found = run("states", tmp_path, monkeypatch, "--longest", "2048")
    assert [length for length, _, _ in found] == [1024, 2048]


@pytest.mark.slow
def test_packed(tmp_path, monkeypatch):
    found = run("packed", tmp_path, monkeypatch, "--steps", "4")
    assert found["packed"][0] == pytest.approx(found["padded"][0], rel=1e-3)


@pytest.mark.slow
def test_own_mixer(tmp_path, monkeypatch):
    found = run("own_mixer", tmp_path, monkeypatch, "--steps", "20")
    assert found["HGRN2"][-1] < found["HGRN2"][0] - 1


@pytest.mark.slow
def test_state_tuning(tmp_path, monkeypatch):
    found = run("state_tuning", tmp_path, monkeypatch, "--steps", "60")
    assert found["shares"]["good"] >= found["shares"]["base"]


@pytest.mark.slow
def test_lora(tmp_path, monkeypatch):
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    found = run("lora", tmp_path, monkeypatch)
    assert found["answers"]["base"].startswith(" Peru.")
    assert found["answers"]["loud"].startswith(" PERU!")
