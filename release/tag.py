"""Tags a release, whose files ``make release`` has built and checked. Nothing is published.

``python -m release.tag --check`` says whether this commit may be released; ``python -m release.tag dist`` sums up the files and tags it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from .wheels import ROOT

VERSION = re.compile(r'^__version__ = "([0-9]+\.[0-9]+\.[0-9]+[a-z0-9.]*)"$', re.MULTILINE)


def git(*words: str) -> str:
    """The standard output."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def faults(package: str, changes: str, citation: str, tags: list[str], changed: str) -> list[str]:
    """Why a commit cannot be released. The texts of penstock/__init__.py, CHANGELOG.md, CITATION.cff; git's tags; git's status."""
    found = VERSION.search(package)
    if found is None:
        return ["penstock/__init__.py must have a version, got none."]
    version, listed = found[1], []
    if changed:
        listed.append(f"the working tree must be clean, got:\n{changed}\nCommit or remove these.")
    if f"v{version}" in tags:
        listed.append(f"the version must be new, got {version}, which has a tag. Raise __version__.")
    if not re.search(rf"^## {re.escape(version)} \([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}\)$", changes, re.MULTILINE):
        listed.append(f"CHANGELOG.md must have a section '## {version} (YYYY-MM-DD)', got none. Rename its section Unreleased.")
    if f"\nversion: {version}\n" not in citation:
        listed.append(f"CITATION.cff must have version {version}. Change it.")
    return listed


def checked() -> str:
    """The version. Raises SystemExit if this commit cannot be released."""
    package, changes, citation = ((ROOT / name).read_text("utf-8") for name in ("penstock/__init__.py", "CHANGELOG.md", "CITATION.cff"))
    listed = faults(package, changes, citation, git("tag", "--list").split(), git("status", "--porcelain"))
    if listed:
        raise SystemExit("\n".join(f"release: {one}" for one in listed))
    return VERSION.search(package)[1]  # type: ignore[index]


def main(argument: str) -> None:
    """Checks, and tags unless the argument is --check."""
    version = checked()
    if argument == "--check":
        return
    folder = Path(argument)
    sums = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in sorted(folder.iterdir()) if one.name != "SHA256SUMS"}
    (folder / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    git("tag", "--annotate", f"v{version}", "--message", f"Penstock {version}")
    print(f"v{version} is tagged here, and {folder}/ has its {len(sums)} files and SHA256SUMS. Nothing is published.")
    print(f"To undo it: git tag --delete v{version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
