"""What a commit needs before ``make release`` tags it."""

from importlib import import_module

import pytest

pytest.importorskip("hatchling", reason="hatchling: pip install -e '.[test]'")
tag = import_module("release.tag")

PACKAGE, CHANGES, CITATION = '__version__ = "1.2.0"\n', "# Changelog\n\n## 1.2.0 (2030-01-31)\n", "title: Penstock\nversion: 1.2.0\n"


def test_a_commit_that_can_be_released():
    assert tag.faults(PACKAGE, CHANGES, CITATION, ["v1.1.0"], "") == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"package": ""}, "penstock/__init__.py must have a version, got none."),
        ({"changes": "# Changelog\n\n## Unreleased\n"}, "CHANGELOG.md must have a section '## 1.2.0 (YYYY-MM-DD)', got none."),
        ({"citation": "version: 1.1.0\n"}, "CITATION.cff must have version 1.2.0."),
        ({"tags": ["v1.2.0"]}, "the version must be new, got 1.2.0, which has a tag."),
        ({"changed": " M README.md"}, "the working tree must be clean, got:\n M README.md\n"),
    ],
)
def test_faults_are_named(changed, fault):
    given = {"package": PACKAGE, "changes": CHANGES, "citation": CITATION, "tags": [], "changed": ""} | changed
    (found,) = tag.faults(**given)
    assert found.startswith(fault)


def test_the_version_of_this_commit_and_of_the_citation_are_equal():
    package, citation = ((tag.ROOT / name).read_text() for name in ("penstock/__init__.py", "CITATION.cff"))
    assert f"\nversion: {tag.VERSION.search(package)[1]}\n" in citation
