"""The reference has every public name, and the site builds without a warning."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from documents import ROOT

MODULES = ["penstock", "penstock.models", "penstock.layers", "penstock.engine", "penstock.distributed"]
MOVED = {"penstock.explain": "penstock.explain.explain", "penstock.summary": "penstock.summary.summary"}
"""Functions with the name of their module, which is what the shorter name would mean."""
ELSEWHERE = {"penstock.distributed"}
"""Public modules, which have pages of their own."""


def documented():
    """The names in the pages of the reference."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__} - ELSEWHERE
    found = set(documented())
    assert sorted(name for name in names if MOVED.get(name, name) not in found) == []


def test_no_name_is_documented_twice():
    found = documented()
    assert len(found) == len(set(found))


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    text = (tmp_path / "site/reference/functions.html").read_text("utf-8")
    assert "Multiplies the output." in text, "parts of docstrings are put in"
    assert "<math" in text
    assert ":math:" not in text
    assert "penstock serve" in (tmp_path / "site/reference/cli.html").read_text("utf-8")
    assert "chunk_gla" in (tmp_path / "site/reference/fla.html").read_text("utf-8")
    script, index = ((tmp_path / "site/search/search_index").with_suffix(suffix).read_text("utf-8") for suffix in (".js", ".json"))
    assert script.removeprefix("var __index = ") == index, "a page from file:// searches too"
    assert '<script src="search.js">' in (tmp_path / "site/index.html").read_text("utf-8")


DOCSTRING = """Adds.

.. math:: z = x + y

x, y : int
    Numbers, as ``1``.

>>> 1 + 1
2
"""


def test_docstrings_become_markdown(monkeypatch):
    pytest.importorskip("griffe")
    pytest.importorskip("latex2mathml")
    monkeypatch.syspath_prepend(ROOT)
    text = importlib.import_module("website.docstrings").markdown(DOCSTRING)
    assert text.startswith('Adds.\n\n<div class="formula"><math')
    assert text.endswith("`x, y` *int*\n:   Numbers, as `1`.\n\n```pycon\n>>> 1 + 1\n2\n```")
