"""The inspection of wheels finds every fault that it looks for, in libraries of all formats that Zig links."""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from importlib import import_module

import pytest

for name in ("cyclonedx", "elftools", "hatchling", "macholib", "pefile"):
    pytest.importorskip(name, reason=f"{name}: pip install -e '.[test]'")
from penstock import cpu  # noqa: E402

hatch_build = import_module("hatch_build")
bill, check, libraries, wheels = (import_module(f"release.{name}") for name in ("bill", "check", "libraries", "wheels"))

C = """
#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
EXPORT int penstock_sum_baseline(int a) { return a + 1; }
"""
FLAGS_OF = {"so": ["-fPIC"], "dylib": ["-fPIC"], "dll": ["-Wl,--no-entry"]}
LINUX = "manylinux_2_17_aarch64"  # has one instruction set
SOURCES = {
    "penstock/__init__.py": b'__version__ = "1.0"\n',
    "penstock/sum/cpu/native/sum.c": b"EXPORT void NAME(penstock_sum_, SUFFIX)(int a) {}\n",
    "penstock/cpu/native/rows.h": b"",
    "pyproject.toml": b"",
}
METADATA = b"Metadata-Version: 2.4\nName: penstock\nVersion: 1.0\nDescription-Content-Type: text/markdown\n\nKernels.\n"


def linked(folder, tag, *flags):
    platform = check.PLATFORMS[tag]
    source, made = folder / "sum.c", folder / f"sum.{platform.suffix}"
    source.write_text(C)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target, "-shared", "-s", "-nostdlib", *hatch_build.FLAGS]
    subprocess.run([*command, *FLAGS_OF[platform.suffix], *flags, str(source), "-o", str(made)], check=True)
    content = made.read_bytes()
    return hatch_build.without_time(content) if platform.suffix == "dll" else content


@pytest.mark.parametrize("tag", check.PLATFORMS)
def test_libraries_of_every_platform(tag, tmp_path):
    found = libraries.read(check.library(tag), linked(tmp_path, tag))
    assert found.exports == {"penstock_sum_baseline"}
    assert tag.endswith(found.processor)
    assert found.faults == ()
    assert found.oldest == ((11, 0) if "macosx" in tag else ())


def test_faults_of_a_library(tmp_path):
    right = libraries.Library("aarch64", frozenset(["penstock_sum_baseline"]), frozenset(["libc.so.6"]), (2, 17), ())
    assert not [*check.library_faults(right, LINUX, {"penstock_sum_"})]
    wrong = {
        "it is for x86_64": right._replace(processor="x86_64"),
        "it loads libgomp.so.1": right._replace(loads=frozenset(["libgomp.so.1"])),
        "it needs version 2.18 of the system": right._replace(oldest=(2, 18)),
        "it needs version unknown of the system": right._replace(oldest=()),
        "it lacks penstock_sum_baseline": right._replace(exports=frozenset()),
        "it exports malloc": right._replace(exports=right.exports | {"malloc"}),
    }
    assert {fault: [*check.library_faults(one, LINUX, {"penstock_sum_"})] for fault, one in wrong.items()} == {one: [one] for one in wrong}
    every = check.PLATFORMS["win_amd64"].sets
    assert [*check.library_faults(right._replace(processor="amd64", loads=frozenset()), "win_amd64", {"penstock_sum_"})] == [
        f"it lacks penstock_sum_{one.suffix}" for one in every[1:]
    ]


def test_search_paths_and_executable_stacks_are_faults(tmp_path):
    content = bytearray(linked(tmp_path, LINUX, "-Wl,-rpath,/somewhere"))
    content[content.index(b"\x51\xe5\x74\x64") + 4] |= 1  # the flags of the segment PT_GNU_STACK
    assert libraries.read("sum.so", content).faults == ("it has a search path, DT_RUNPATH", "its stack is executable")
    assert libraries.read("sum.dylib", linked(tmp_path, "macosx_11_0_arm64", "-Wl,-rpath,/somewhere")).faults == (
        "it has a search path, LC_RPATH",
    )


def written(folder, content, changes=()):
    """A wheel of SOURCES, with some of its files changed (None: left out) after RECORD was made."""
    files = {"penstock/__init__.py": SOURCES["penstock/__init__.py"], f"penstock/cpu/native/{check.library(LINUX)}": content}
    files["penstock_lm-1.0.dist-info/METADATA"] = METADATA
    files["penstock_lm-1.0.dist-info/WHEEL"] = f"Tag: py3-none-{LINUX}\n".encode()
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(one).digest()).rstrip(b"=").decode() for name, one in files.items()}
    record = "".join(f"{name},sha256={hashes[name]},{len(one)}\n" for name, one in files.items()) + "penstock_lm-1.0.dist-info/RECORD,,\n"
    files["penstock_lm-1.0.dist-info/RECORD"] = record.encode()
    wheel = folder / f"penstock_lm-1.0-py3-none-{LINUX}.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, one in (files | dict(changes)).items():
            if one is not None:
                packed.writestr(zipfile.ZipInfo(name), one)
    return wheel


def test_faults_of_a_wheel(tmp_path, monkeypatch):
    fine = libraries.Library("aarch64", frozenset(["penstock_sum_baseline"]), frozenset(["libc.so.6"]), (2, 17), ())
    monkeypatch.setattr(check, "read", lambda name, content: fine)
    content = linked(tmp_path, LINUX)
    library = f"penstock/cpu/native/{check.library(LINUX)}"

    def faults(content=content, **changes):
        return [*check.wheel_faults(written(tmp_path, content, {place[name]: one for name, one in changes.items()}), SOURCES)]

    place = {
        "code": "penstock/__init__.py", "library": library, "header": "penstock/cpu/native/rows.h",
        "about": "penstock_lm-1.0.dist-info/METADATA", "tag": "penstock_lm-1.0.dist-info/WHEEL",
    }  # fmt: skip
    assert not faults()
    assert faults(code=None) == ["penstock/__init__.py is missing"]
    assert faults(header=b"") == ["penstock/cpu/native/rows.h does not belong in it", "RECORD is wrong about penstock/cpu/native/rows.h"]
    assert faults(code=b"other") == [
        "penstock/__init__.py is not that of the source archive", "RECORD is wrong about penstock/__init__.py",
    ]  # fmt: skip
    assert faults(library=None) == [f"{library} is missing"]
    assert f"WHEEL does not have the tag {LINUX}" in faults(tag=b"Tag: py3-none-any\n")
    assert any("version 2.0" in fault for fault in faults(about=METADATA.replace(b"Version: 1.0", b"Version: 2.0")))
    assert any("description" in fault for fault in faults(about=METADATA.replace(b"text/markdown", b"text/other")))
    assert faults(content + f"{check.ROOT}/penstock".encode())[0] == f"its library has the path {check.ROOT}"
    monkeypatch.setattr(check, "LARGEST", 10)
    assert faults()[0].endswith("bytes, more than 10")


def test_the_functions_are_those_that_are_launched():
    package = wheels.ROOT / "penstock"
    sources = {str(one.relative_to(wheels.ROOT)): one.read_bytes() for one in package.glob("*/cpu/native/*.c")}
    launching = "".join(one.read_text() for one in package.glob("*/cpu/*.py"))
    launched = {f"penstock_{name}_" for name in re.findall(r'\brun\("(\w+)"', launching)}
    assert check.functions(sources) == launched >= {"penstock_forward_", "penstock_delta_backward_"}
    if cpu.LIBRARY.exists():
        assert cpu.unavailable(*(name.removeprefix("penstock_").removesuffix("_") for name in launched)) is None


def test_the_bill_of_materials_has_files_bundled_packages_and_tools(tmp_path):
    archive = tmp_path / "penstock_lm-1.0.tar.gz"
    archive.write_bytes(b"sources")
    requirements, notices = (wheels.ROOT / "release" / "requirements.txt").read_text(), (wheels.ROOT / bill.BUNDLED).read_text()
    text = bill.bill([archive], requirements, notices, 0)
    assert text == bill.bill([archive], requirements, notices, 0)
    assert hashlib.sha256(b"sources").hexdigest() in text
    tools = {(one.name, one.version): one for one in bill.built_with(requirements)}
    assert {name for name, _ in tools} >= {"build", "hatchling", "ziglang"}
    assert all(f"{name}=={version}" in requirements and one.external_references for (name, version), one in tools.items())
    assert len(tools) == len(re.findall(r"^[\w-]+==", requirements, re.MULTILINE))
    assert "markdown-it" in {one.name for one in bill.bundled(notices)}
