"""Inspects wheels and the source archive, and builds the wheel of this machine again: equal commits must give equal bytes.

    python -m release.check dist [--once]

For each wheel: its files are those of the source archive that it should have, and the native library; its hashes and metadata are right;
the library runs on every system of the tag, exports the functions of every instruction set, and has no path of this machine.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from packaging.metadata import ExceptionGroup, Metadata
from packaging.utils import parse_wheel_filename

from hatch_build import PLATFORMS, library, of_this_machine

from .libraries import Library, read
from .wheels import ROOT, build_wheel, only, unpacked

LARGEST = 1_870_000
"""Bytes of a wheel: what the largest has, and a tenth."""
ALLOWED = {  # libraries of the system, by the tag's first word
    "manylinux": r"libc\.so\.6|libm\.so\.6|ld-linux-.*",
    "musllinux": r"libc\.so",
    "macosx": r"/usr/lib/libSystem\.B\.dylib",
    "win": r"KERNEL32\.dll|api-ms-win-crt-.*\.dll",
}
EXPORTED = re.compile(r"^EXPORT void NAME\((penstock_\w+_), SUFFIX\)", re.MULTILINE)


def functions(sources: dict[str, bytes]) -> set[str]:
    """What the C sources export, without the suffix of an instruction set."""
    native = [content.decode() for name, content in sources.items() if "/cpu/native/" in name and name.endswith(".c")]
    return {name for text in native for name in EXPORTED.findall(text)}


def library_faults(found: Library, tag: str, exported: set[str]) -> Iterable[str]:
    """What is wrong with a library for the platform of a tag."""
    yield from found.faults
    if not tag.endswith(found.processor):
        yield f"it is for {found.processor}"
    system = next(name for name in ALLOWED if tag.startswith(name))
    yield from (f"it loads {name}" for name in sorted(found.loads) if not re.fullmatch(ALLOWED[system], name))
    version = tuple(map(int, re.findall(r"(?<=_)\d+(?=_)", tag)))
    if system in ("manylinux", "macosx") and not () < found.oldest <= version:
        yield f"it needs version {'.'.join(map(str, found.oldest)) or 'unknown'} of the system"
    wanted = {name + one.suffix for name in exported for one in PLATFORMS[tag].sets}
    yield from (f"it lacks {name}" for name in sorted(wanted - found.exports))
    yield from (f"it exports {name}" for name in sorted(found.exports - wanted))


def expected(sources: Iterable[str], tag: str) -> set[str]:
    """The files of the package in a wheel."""
    package = {name for name in sources if name.startswith("penstock/") and "native" not in PurePosixPath(name).parts}
    return package | {f"penstock/cpu/native/{library(tag)}"}


def record_faults(record: str, files: dict[str, bytes]) -> Iterable[str]:
    """Files whose hashes and sizes are not those of RECORD."""
    listed = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record))}
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if not name.endswith("/RECORD") and listed.get(name) != (f"sha256={digest}", str(len(content))):
            yield f"RECORD is wrong about {name}"


def wheel_faults(wheel: Path, sources: dict[str, bytes]) -> Iterable[str]:
    """What is wrong with a wheel. Sources: the files of the source archive."""
    _, version, _, tags = parse_wheel_filename(wheel.name)
    (tag,) = (one.platform for one in tags)
    with zipfile.ZipFile(wheel) as packed:
        times = {one.date_time for one in packed.infolist()}
        files = {one: packed.read(one) for one in packed.namelist()}
    about = f"{wheel.name.partition('-')[0]}-{version}.dist-info"
    package = {one for one in files if not one.startswith(f"{about}/")}
    wanted = expected(sources, tag)
    yield from (f"{one} is missing" for one in sorted(wanted - package))
    yield from (f"{one} does not belong in it" for one in sorted(package - wanted))
    yield from (f"{one} is not that of the source archive" for one in sorted(package & set(sources)) if files[one] != sources[one])
    yield from record_faults(files[f"{about}/RECORD"].decode(), files)
    if f"Tag: py3-none-{tag}\n" not in files[f"{about}/WHEEL"].decode():
        yield f"WHEEL does not have the tag {tag}"
    yield from metadata_faults(files[f"{about}/METADATA"], str(version))
    if len(times) != 1:
        yield "its files have several times"
    if wheel.stat().st_size > LARGEST:
        yield f"it has {wheel.stat().st_size} bytes, more than {LARGEST}"
    content = files.get(f"penstock/cpu/native/{library(tag)}")
    if content is not None:
        yield from library_faults(read(library(tag), content), tag, functions(sources))
        places = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sys.prefix} - {"/"}
        yield from (f"its library has the path {place}" for place in sorted(places) if place.encode() in content)


def metadata_faults(content: bytes, version: str) -> Iterable[str]:
    """What an index would refuse, and another version than that of the file's name."""
    try:
        read_back = Metadata.from_email(content, validate=True)
    except ExceptionGroup as errors:
        yield from map(str, errors.exceptions)
        return
    if str(read_back.version) != version or not read_back.description:
        yield f"METADATA has version {read_back.version} and {len(read_back.description or '')} characters of description"


def archive_faults(sources: dict[str, bytes]) -> Iterable[str]:
    """Files of the source archive that are not those of the commit."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    yield from (f"{name} is missing" for name in listed if name.startswith("penstock/") and name not in sources)
    yield from (f"{name} is not in the repository" for name in sorted(set(sources) - set(listed) - {"PKG-INFO"}))
    yield from metadata_faults(sources["PKG-INFO"], str(Metadata.from_email(sources["PKG-INFO"]).version))


def contents(archive: Path) -> dict[str, bytes]:
    """The files of a source archive, by their paths in the repository."""
    with tarfile.open(archive) as packed:
        return {one.name.partition("/")[2]: packed.extractfile(one).read() for one in packed if one.isfile()}  # type: ignore[union-attr]


def again(archive: Path, wheel: Path, tag: str) -> Iterable[str]:
    """Builds a wheel elsewhere, with an empty cache of the compiler."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "cache") for kind in ("GLOBAL", "LOCAL")}
        second = build_wheel(unpacked(archive, folder / "source"), tag, folder / "built", **caches)
        if second.read_bytes() != wheel.read_bytes():
            yield "a second build has other bytes"


def main(folder: str, *options: str) -> None:
    """Prints what is wrong. The exit status is 1 if anything is, or a platform has no wheel."""
    archive = only("check", folder, "*.tar.gz")
    sources = contents(archive)
    faults = {archive.name: [*archive_faults(sources)]}
    for tag in PLATFORMS:
        for wheel in Path(folder).glob(f"*-{tag}.whl"):
            repeated = again(archive, wheel, tag) if tag == of_this_machine() and "--once" not in options else ()
            faults[wheel.name] = [*wheel_faults(wheel, sources), *repeated]
        if not any(name.endswith(f"-{tag}.whl") for name in faults):
            faults[tag] = ["it has no wheel"]
    for name, listed in faults.items():
        print(f"{name}: {'right' if not listed else ''}", *(f"    {fault}" for fault in listed), sep="\n" if listed else "", flush=True)
    raise SystemExit(any(faults.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
