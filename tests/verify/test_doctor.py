"""``penstock doctor``: what it finds on a machine, and what it prints."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.call.families import families
from penstock.cli import main
from penstock.errors import DISTRIBUTION
from penstock.verify import doctor
from penstock.verify.doctor import Diagnosis, Extra


@pytest.fixture(scope="module")
def found():
    return Diagnosis.here()


def test_every_function_has_an_implementation_on_a_cpu(found):
    here = [one for one in found.taken if one.device == "cpu"]
    assert sorted(name for one in here for name in one.functions) == sorted(name for family in families() for name in family.variants)
    for one in here:
        assert one.forward is not None
        assert one.backward is not None
        assert one.forward not in dict(one.refused)
        assert all(reason and not reason.startswith("refuses") for _, reason in one.refused)


def test_the_summary_is_one_paragraph(found):
    assert "\n" not in found.paragraph
    for word in (found.machine.torch, found.machine.penstock, found.build, "recurrence on cpu in float32"):
        assert word in found.paragraph


def test_missing_packages_and_the_line_that_installs_them(monkeypatch):
    lines = [
        "torch>=2", "small>=1; extra == 'one'", "penstock-lm[one,two]; extra == 'all'", 'large[x]>=1; (os_name == "nt") and extra == "two"',
        "tool; extra == 'test'",
    ]  # fmt: skip
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name == "small" else None)
    extras = tuple(doctor._extras())
    assert extras == (Extra("all", ("large",)), Extra("one", ()), Extra("two", ("large",)))


def test_the_name_of_the_distribution_is_that_of_the_project():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nname = "{DISTRIBUTION}"' in project
    assert set(re.findall(r'"([a-z-]+)\[[a-z,]+\]"', project)) == {DISTRIBUTION}


def test_text_and_json(monkeypatch, found):
    other = replace(found, extras=(Extra("plot", ("matplotlib",)), Extra("models", ())), compiler=None)
    monkeypatch.setattr(Diagnosis, "here", staticmethod(lambda: other))
    text, content = (CliRunner().invoke(main, ["doctor", *words]) for words in ([], ["--json"]))
    assert (text.exit_code, content.exit_code) == (0, 0)
    assert "  plot: without matplotlib\n  models: complete\n  To install one: pip install -e '.[EXTRA]' in a checkout, or" in text.output
    assert "C compiler: not found. Triton needs one" in text.output
    assert text.output.endswith(other.paragraph + "\n")
    read = json.loads(content.output)
    assert read["summary"] == other.paragraph
    assert read["machine"]["torch"] == found.machine.torch
    assert len(read["taken"]) == len(found.taken)
