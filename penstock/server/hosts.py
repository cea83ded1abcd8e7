"""Host headers: a web page whose name resolves to this machine (DNS rebinding) must not reach a server that has no key.

Starlette's TrustedHostMiddleware does not know addresses of IPv6, and its answer is neither OpenAI's error object nor names an option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from ..errors import shortened
from .errors import Refused
from .patterns import Pattern

HOSTS = Pattern(
    "allow_host",
    re.compile(r"\*|[a-z0-9._-]+|\[[0-9a-f:.]+\]"),
    "a name such as example.org, in small letters and without a port, an address such as 10.0.0.1 or [fe80::1], or *",
)
"""What clients send as a host."""
PORT = re.compile(r":[0-9]*\Z")
LOCAL = ("localhost", "127.0.0.1", "[::1]")


def known_hosts(host: str, more: Sequence[str], keyed: bool) -> frozenset[str] | None:
    """The hosts that requests to a server at ``host`` may name. None: any, because a key is needed, or others reach the server anyway."""
    if keyed or not _is_loopback(host) or "*" in more:
        return None
    return frozenset([*LOCAL, f"[{host}]" if ":" in host else host.lower(), *more])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_host(scope: Scope, hosts: frozenset[str] | None) -> None:
    """Raise Refused for a request that names another host. One without the header, as in HTTP/1.0, is of no browser."""
    given = Headers(scope=scope).get("host")
    if hosts is None or given is None or PORT.sub("", given).lower() in hosts:
        return
    rule = f"the Host header must be one of {', '.join(sorted(hosts))} without an API key, got {shortened(given)}"
    message = f"server: {rule}. Serve with --allow-host, or with a key."
    raise Refused(403, message, kind="permission_error", code="host_not_allowed")
