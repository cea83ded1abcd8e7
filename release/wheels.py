"""Builds the source archive and, from it, one wheel for each platform of ``hatch_build.py``, all on this machine.

    python -m release.wheels dist [PLATFORM ...]

Times are those of the commit, and sources are unpacked elsewhere: equal commits give equal bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hatch_build import PLATFORMS

ROOT = Path(__file__).parent.parent


def of_commit() -> str:
    """The time of the commit, in seconds."""
    return subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build(source: Path, kind: str, folder: Path, **environment: str) -> None:
    """Runs the build of an archive, ``sdist`` or ``wheel``, with the packages of this environment."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)


def only(function: str, folder: str, pattern: str) -> Path:
    """The file of a folder."""
    found = sorted(Path(folder).resolve().glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{function}: {folder} must have one {pattern}, got {len(found)}. Run make wheels.")
    return found[0]


def unpacked(archive: Path, folder: Path) -> Path:
    """The source tree of an archive."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def build_wheel(source: Path, tag: str, output: Path, **environment: str) -> Path:
    """One wheel of an unpacked archive. Its files have the archive's time."""
    seconds = int((source / "PKG-INFO").stat().st_mtime)
    build(source, "wheel", output, SOURCE_DATE_EPOCH=str(seconds), PENSTOCK_PLATFORM=tag, **environment)
    (wheel,) = output.glob(f"*{tag}.whl")
    return wheel


def main(folder: str, *platforms: str) -> None:
    """Builds into an empty or new folder."""
    output = Path(folder).resolve()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SystemExit(f"wheels: the folder must be empty, got {folder}. Remove it, or name another one.")
    build(ROOT, "sdist", output, SOURCE_DATE_EPOCH=of_commit())
    (archive,) = output.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as place:
        source = unpacked(archive, Path(place))
        for tag in platforms or PLATFORMS:
            wheel = build_wheel(source, tag, output)
            print(f"{wheel.name}: {wheel.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
