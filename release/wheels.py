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


def main(folder: str, *platforms: str) -> None:
    """Builds into an empty or new folder."""
    output, epoch = Path(folder).resolve(), of_commit()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SystemExit(f"wheels: the folder must be empty, got {folder}. Remove it, or name another one.")
    build(ROOT, "sdist", output, SOURCE_DATE_EPOCH=epoch)
    (archive,) = output.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
        (source,) = Path(place).iterdir()
        for tag in platforms or PLATFORMS:
            build(source, "wheel", output, SOURCE_DATE_EPOCH=epoch, PENSTOCK_PLATFORM=tag)
            print(*(f"{wheel.name}: {wheel.stat().st_size} bytes" for wheel in output.glob(f"*{tag}.whl")), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
