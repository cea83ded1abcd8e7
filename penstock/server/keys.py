"""API keys: who a client is, and what it may ask for.

A file has a line for each key, ``NAME KEY [requests_per_minute=N] [tokens_per_minute=N] [priority=N]``. Empty lines and those that begin
with ``#`` are left out. Keys are kept as hashes only, and no error has one in its text.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ..errors import InvalidArgument, RangeError
from ..files import read_text
from .errors import Refused
from .quotas import Quota

LOG = logging.getLogger("penstock.server")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
"""It is in logs, and the name of a folder of states."""
SECRET = re.compile(r"[!-~]{8,512}", re.ASCII)
OPTION = re.compile(r"(requests_per_minute|tokens_per_minute|priority)=(0|-?[1-9][0-9]{0,8})", re.ASCII)
WORDS = "NAME KEY [requests_per_minute=N] [tokens_per_minute=N] [priority=N]"


@dataclass(frozen=True)
class Key:
    """One key. States and kept prefixes belong to its name."""

    name: str = ""
    """Empty for the only key of a server without a file of keys."""
    digest: bytes = field(default=b"", repr=False)
    quota: Quota = field(default_factory=Quota)
    priority: int = 0
    """The lowest value, which is the most urgent one, that requests may have as ``priority``."""


class Keys:
    """The keys of a server.

    found : list of Key
    path : Path, optional
        The file that ``reread`` reads.
    """

    def __init__(self, found: list[Key], path: Path | None = None) -> None:
        self._found, self._path = found, path

    @classmethod
    def single(cls, secret: str) -> Keys:
        """One key without a name."""
        return cls([Key(digest=_digest(secret))])

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Those of a file. Raises RangeError with the number of the first wrong line."""
        return cls(_parsed(read_text(path, "serve", "api_key_file")), path)

    def reread(self) -> None:
        """Read the file again. A file with an error changes nothing. What a name has used of its limits counts on, if they are the same."""
        assert self._path is not None
        before = {one.name: one.quota for one in self._found}
        try:
            found = _parsed(read_text(self._path, "serve", "api_key_file"), before)
        except InvalidArgument as error:
            LOG.error("the file of keys was not read again, the keys before are used on: %s", error)
            return
        self._found = found
        LOG.info("%d keys were read again", len(found))

    def check(self, authorization: str) -> Key:
        """The key of a header. Raises Refused with status 401. Its time does not depend on how much of a key is right, nor on which one."""
        scheme, _, given = authorization.partition(" ")
        digest, key = _digest(given), None
        for one in self._found:
            if hmac.compare_digest(digest, one.digest):
                key = one
        if key is None or scheme.lower() != "bearer":
            message = "server: the API key must be one of this server, got another or none. Send it as bearer token or x-api-key."
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
        return key


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _parsed(text: str, quotas: dict[str, Quota] | None = None) -> list[Key]:
    found: list[Key] = []
    names, digests = dict[str, int](), dict[bytes, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        if len(words) < 2:
            _refuse(number, WORDS, "one word")
        name, secret, *options = words
        digest = _digest(secret)
        if NAME.fullmatch(name) is None:
            _refuse(number, "a name of 1 to 64 letters, digits, - and _, then a key", "another name")
        if SECRET.fullmatch(secret) is None:
            _refuse(number, "a name, then a key of 8 to 512 ASCII characters", f"a key of {len(secret)} characters")
        if name in names:
            _refuse(number, "a name that no other line has", f"that of line {names[name]}")
        if digest in digests:
            _refuse(number, "a key that no other line has", f"that of line {digests[digest]}")
        names[name] = digests[digest] = number
        given = _options(number, options)
        limits = given.get("requests_per_minute"), given.get("tokens_per_minute")
        before = (quotas or {}).get(name)
        quota = before if before is not None and before.limits == limits else Quota(*limits)
        found.append(Key(name, digest, quota, given.get("priority", 0)))
    if not found:
        raise RangeError("serve: api_key_file must have at least one key, got none. Write lines of NAME KEY.")
    return found


def _options(number: int, words: list[str]) -> dict[str, int]:
    given: dict[str, int] = {}
    for word in words:
        match = OPTION.fullmatch(word)
        if match is None:
            _refuse(number, WORDS, "another word after the key")
        name, value = match[1], int(match[2])
        if name in given:
            _refuse(number, "options that are given once", f"{name} twice")
        if name != "priority" and value < 1:
            _refuse(number, f"{name} of at least 1", str(value))
        if name == "priority" and not -1000 <= value <= 0:
            _refuse(number, "priority from -1000 to 0, the lowest value that its requests may have", str(value))
        given[name] = value
    return given


def _refuse(number: int, rule: str, got: str) -> NoReturn:
    raise RangeError(f"serve: line {number} of api_key_file must be {rule}, got {got}. docs/server.md has the format.")
