"""What a shared library says of itself: processor, exported names, libraries that it loads, and the oldest system with what it needs."""

from __future__ import annotations

import re
import tempfile
from typing import NamedTuple

import pefile
from elftools.elf.elffile import ELFFile
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

ELF_PROCESSORS = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
MACH_PROCESSORS = {0x1000007: "x86_64", 0x100000C: "arm64"}
PE_PROCESSORS = {0x8664: "amd64", 0xAA64: "arm64"}
MACH_OWN = {"_mh_dylib_header", "__dso_handle"}  # names that the linker adds


class Library(NamedTuple):
    """The answers."""

    processor: str
    exports: frozenset[str]
    loads: frozenset[str]
    """The libraries that it needs."""
    oldest: tuple[int, ...]
    """The newest version of glibc whose symbols it uses, or the oldest macOS; empty if nothing is recorded."""
    faults: tuple[str, ...]
    """What would keep a system from loading it."""


def read(name: str, content: bytes) -> Library:
    """By the suffix of its name."""
    return {"so": _elf, "dylib": _mach, "dll": _pe}[name.rpartition(".")[2]](content)


def _elf(content: bytes) -> Library:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        elf = ELFFile(file)
        dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        exports = frozenset(one.name for one in symbols.iter_symbols() if one.name and one["st_shndx"] != "SHN_UNDEF")
        versions = elf.get_section_by_name(".gnu.version_r")
        used = [one.name for _, listed in versions.iter_versions() for one in listed] if versions else []
        numbers = [(name, re.fullmatch(r"GLIBC_([0-9.]+)", name)) for name in used]
        oldest = max((tuple(map(int, found[1].split("."))) for _, found in numbers if found), default=())
        stack = [one for one in elf.iter_segments() if one.header.p_type == "PT_GNU_STACK"]
        faults = [f"it has a search path, {tag}" for tag in ("DT_RPATH", "DT_RUNPATH") if any(dynamic.iter_tags(tag))]
        faults += [] if stack and not stack[0].header.p_flags & 1 else ["its stack is executable"]
        faults += [f"it needs {name}" for name, found in numbers if not found]
        loads = frozenset(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))
        return Library(ELF_PROCESSORS.get(elf["e_machine"], elf["e_machine"]), exports, loads, oldest, tuple(faults))


def _mach(content: bytes) -> Library:
    with tempfile.NamedTemporaryFile(suffix=".dylib") as file:
        file.write(content)
        file.flush()
        binary = MachO(file.name)
        (header,) = binary.headers
        names = [name.decode().removeprefix("_") for _, name in SymbolTable(binary, header).extdefsyms]
    commands = [(kind.get_cmd_name(), command, data) for kind, command, data in header.commands]
    loads = frozenset(data.rstrip(b"\0").decode() for name, _, data in commands if name == "LC_LOAD_DYLIB")
    least = [int(command.minos) for name, command, _ in commands if name == "LC_BUILD_VERSION"]
    processor = MACH_PROCESSORS.get(header.header.cputype, str(header.header.cputype))
    faults = [f"it has a search path, {name}" for name, _, _ in commands if name == "LC_RPATH"]
    if processor == "arm64" and not any(name == "LC_CODE_SIGNATURE" for name, _, _ in commands):
        faults.append("it has no signature, which Apple's processors demand")
    oldest = (least[0] >> 16, least[0] >> 8 & 255) if least else ()
    return Library(processor, frozenset(names) - MACH_OWN, loads, oldest, tuple(faults))


def _pe(content: bytes) -> Library:
    binary = pefile.PE(data=content)
    exports = frozenset(one.name.decode() for one in binary.DIRECTORY_ENTRY_EXPORT.symbols)
    loads = frozenset(one.dll.decode() for one in getattr(binary, "DIRECTORY_ENTRY_IMPORT", ()))
    faults = () if binary.FILE_HEADER.TimeDateStamp == 0 else ("it has the time of its linking",)
    machine = binary.FILE_HEADER.Machine
    return Library(PE_PROCESSORS.get(machine, hex(machine)), exports, loads, (), faults)
