"""OpenAI's error object, and which exception becomes which status."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from ..errors import InvalidArgument, OutOfMemory, PenstockError, QueueFull, shortened

LOG = logging.getLogger("penstock.server")
RETRY_SECONDS = 1
"""What a client waits for before it tries again. Requests leave the queue within seconds or are many times too many."""


class Refused(Exception):
    """An answer that is an error. It does not leave the server."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.code, self.headers = status, kind, code, headers
        self.message, self.param = _printable(message), param and _printable(param)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Refused, kind=self.kind, param=self.param, code=self.code, headers=self.headers), (self.status, self.message)

    @property
    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.content, self.status, self.headers)


def _printable(text: str) -> str:
    """A text without lone surrogates, which JSON can have and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def refusal(error: BaseException, param: str | None = None) -> Refused:
    """The answer for an exception. Unexpected ones are logged, and clients do not see their text.

    param : str, optional
        The field of the request that a wrong argument came from. Default: that which its message names.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return Refused(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, InvalidArgument):
        named = re.match(r"\w+: (\w+) must ", str(error))
        message = str(error) if named is None or param is None else f"server: {param} must {str(error)[named.end() :]}"
        return Refused(400, message, param=param or (named and named[1]))
    if isinstance(error, RecursionError):  # all that is nested is of the request
        return Refused(400, "server: the request must be nested less deeply, got too many levels of objects and lists.", param=param)
    if isinstance(error, OutOfMemory):
        return Refused(503, str(error), kind="server_error", code="out_of_memory")
    if isinstance(error, PenstockError):
        LOG.error("a request failed", exc_info=error)
        return Refused(500, str(error), kind="server_error", code="engine_error")
    LOG.error("a request failed", exc_info=error)
    return Refused(500, "server: the request must not raise, got an internal error. The server's log has it.", kind="server_error")


def shutting_down() -> Refused:
    """The answer while the server ends."""
    return Refused(503, "server: it must be running, got a shutdown.", kind="server_error", code="shutting_down")


def invalid_body(function: str, error: ValidationError) -> Refused:
    """The broken rules of a request's fields: of each list, that of the first wrong item."""
    found = error.errors(include_url=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    listed = unknown or found
    lines = dict.fromkeys(_line(function, one) for one in listed)
    code = "unsupported_parameter" if unknown else None
    return Refused(400, "\n".join(lines), param=_name(listed[0]) or _named(listed[0]["msg"]), code=code)


def _line(function: str, one: Any) -> str:
    name, got = _name(one), shortened(one["input"])
    if one["type"] == "extra_forbidden":
        return f"{function}: {name} must be absent, got {got}. This server does not support it."
    if one["type"] == "missing":
        return f"{function}: {name} must be given, got none."
    if one["type"] == "value_error":
        return f"{function}: {one['msg'].removeprefix('Value error, ')}."
    rule = "be a JSON object" if one["type"] == "model_type" else re.sub(r"^\w+ should ", "", one["msg"])
    return f"{function}: {name or 'the body'} must {rule}, got {got}. {one.get('ctx', {}).get('remedy', '')}".rstrip()


def _named(message: str) -> str | None:
    """The field that the message of a rule between fields begins with."""
    found = re.match(r"Value error, (\w+) must ", message)
    return found and found[1]


def _name(one: Any) -> str:
    """The place of a field."""
    parts = [str(part) for part in one["loc"] if part != "[key]"]
    return ".".join(part if len(part) < 60 else f"{part[:57]}..." for part in parts)
