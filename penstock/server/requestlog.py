"""One line of the log for each request, with the id that its answer and all other lines about it have."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from datetime import datetime, timezone
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .caller import Caller, current, enter
from .errors import Refused
from .keys import Key
from .pagefiles import PATHS
from .tracing import Tracing

LOG = logging.getLogger("penstock.server.requests")
LogFormat = Literal["text", "json"]
HEADER = "x-request-id"
KEY = "penstock.key"
"""In the scope of a request that the door has let in: its key."""
ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
QUIET = {"/health", "/metrics", *PATHS}
"""Their lines have level DEBUG: balancers ask every second."""


class RequestLog:
    """Gives each request an id, logs it when it has ended, and records its spans."""

    def __init__(self, app: ASGIApp, model: str, tracing: Tracing | None = None) -> None:
        self._app, self._model, self._tracing = app, model, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER)
        valid = given is None or ID.fullmatch(given) is not None
        name = given if given is not None and valid else made_id()
        caller = Caller(name, (scope["client"] or ("",))[0], scope.get(KEY) or Key())
        if not valid:
            rule = f"{HEADER} must be 1 to 128 letters, digits, points, - and _"
            caller.refused = Refused(400, f"server: {rule}, got another one. Leave it out to get one.", code="invalid_request_id")
        enter(caller)

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = caller.id
                caller.status = caller.status or message["status"]
            await send(message)

        try:
            await self._app(scope, receive, identified)
        finally:
            caller.seconds = time.perf_counter() - caller.began
            endpoint = getattr(scope.get("route"), "path", "other")
            caller.model = caller.model or self._model
            log(scope["method"], endpoint, caller)
            if self._tracing is not None:
                self._tracing.record(scope["method"], endpoint, caller, headers)


def made_id() -> str:
    """An id for a request that has none."""
    return secrets.token_hex(16)


def log(method: str, endpoint: str, caller: Caller) -> None:
    """The line of a request. ``endpoint`` is the path of a route, so it has nothing that a client made up."""
    status = caller.status or 500
    fields: dict[str, Any] = {
        "request_id": caller.id, "key": caller.key.name or None, "method": method, "endpoint": endpoint, "status": status,
        "seconds": round(caller.seconds, 6), "error": caller.error,
    }  # fmt: skip
    fields |= caller.counts if caller.generation is None else counts(caller)
    level = logging.DEBUG if endpoint in QUIET and status < 500 else logging.ERROR if status >= 500 else logging.INFO
    LOG.log(level, "request", extra={"fields": fields})


def counts(caller: Caller) -> dict[str, Any]:
    """What a line has of the tokens of a request."""
    done = caller.generation
    if done is None:
        return {}
    usage, first = done.usage(), done.first
    return {
        "model": caller.model, "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "completion_tokens": usage.completion_tokens, "first_token_seconds": None if first is None else round(first - caller.began, 6),
        "finish_reasons": [one.finish_reason for request in done.requests for one in request.result.completions],
    }  # fmt: skip


class _Identified(logging.Filter):
    """Gives every line the id of the request that it is about."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__["fields"] = {"request_id": current().id or None, **getattr(record, "fields", {})}
        return True


class TextFormatter(logging.Formatter):
    """Time, level, message, then ``name=value`` of the fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without an exception."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)])


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class JsonFormatter(logging.Formatter):
    """An object of JSON on each line. Times are UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """ISO 8601."""
        return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        found = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def log_config(form: LogFormat) -> dict[str, Any]:
    """For ``logging.config.dictConfig``: lines of Penstock and uvicorn go to standard error."""
    formatter = {"text": TextFormatter, "json": JsonFormatter}[form]
    handler = {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["identified"]}
    logger = {"handlers": ["lines"], "level": "INFO", "propagate": False}
    return {
        "version": 1, "disable_existing_loggers": False,
        "filters": {"identified": {"()": _Identified}}, "formatters": {"lines": {"()": formatter}},
        "handlers": {"lines": handler}, "loggers": {"penstock": logger, "uvicorn": logger},
    }  # fmt: skip
