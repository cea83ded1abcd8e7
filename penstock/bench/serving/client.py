"""A client with little overhead, so that it can run next to the server: HTTP/1.1 over asyncio's streams, one connection per request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from ...errors import Complaints, EngineError, RangeError
from .workload import Job

MOST_HEADERS = 2**16
KEY_VARIABLE = "PENSTOCK_API_KEY"
"""The environment variable with the key of the server."""
REFUSED = (401, 403)


@dataclass
class Answer:
    """The answer to one request, with times."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    """The time of each piece of text."""
    done: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class Target:
    """A server.

    url : str
        Such as http://127.0.0.1:8000, without a path.
    """

    def __init__(self, url: str, api_key: str | None = None, seconds: float = 600) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or port == 0:
            complaints = Complaints("bench-serve")
            complaints.add(RangeError, "url", "http:// or https://, a host and a port", repr(url), "For example http://127.0.0.1:8000.")
            complaints.raise_any()
        assert parts.hostname is not None
        self.url, self._host, self._secure = url, parts.hostname, parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        self._key, self._seconds = api_key, seconds
        self.model = ""

    async def find_model(self) -> str:
        """The name of the server's first model. Raises EngineError if there is no such server, or if it refuses the key."""
        try:
            status, pieces = await asyncio.wait_for(self._whole("GET", "/v1/models"), 30)
            if status in REFUSED:
                got = f"{'another one' if self._key else 'none'} ({_refusal(status, pieces)})"
                remedy = f"Pass --api-key KEY, or set {KEY_VARIABLE} in the environment."
                raise EngineError(f"bench-serve: api_key must be one that {self.url} takes, got {got}. {remedy}")
            if status != 200:
                raise ValueError(_refusal(status, pieces))
            self.model = str(json.loads(pieces)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            remedy = "Start one: penstock serve --model PATH."
            raise EngineError(
                f"bench-serve: url must be of a server of OpenAI's API, got {self.url!r} ({_reason(error)}). {remedy}"
            ) from error
        return self.model

    async def complete(self, job: Job) -> Answer:
        """Stream one completion."""
        answer = Answer(perf_counter())
        body = {
            "model": self.model, "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            await asyncio.wait_for(self._stream(body, answer), self._seconds)
        except (OSError, ValueError, LookupError, TypeError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            answer.error = _reason(error)
        answer.done = perf_counter()
        return answer

    async def _stream(self, body: dict[str, Any], answer: Answer) -> None:
        rest, ended = b"", False
        async for status, piece in self._pieces("POST", "/v1/completions", body):
            now, rest = perf_counter(), rest + piece
            if status != 200:
                answer.error = _refusal(status, rest)
                continue
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    ended = True
                elif event.startswith(b"data: "):
                    _take(json.loads(event[6:]), answer, now)
        if answer.error is None and not ended:
            answer.error = "the stream ended early"

    async def _whole(self, method: str, path: str) -> tuple[int, bytes]:
        status, content = 0, b""
        async for status, piece in self._pieces(method, path):  # noqa: B007
            content += piece
        return status, content

    async def _pieces(self, method: str, path: str, body: Any = None) -> AsyncIterator[tuple[int, bytes]]:
        """The status, and each piece of the body."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._secure or None, limit=MOST_HEADERS)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close"]
            lines += [f"Authorization: Bearer {self._key}"] if self._key else []
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"] if body is not None else []
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(head.split(" ", 2)[1])
            yield status, b""
            if "\r\ntransfer-encoding: chunked" in head:
                while size := int((await reader.readline()).split(b";")[0], 16):
                    yield status, (await reader.readexactly(size + 2))[:-2]
            else:
                while piece := await reader.read(2**16):
                    yield status, piece
        finally:
            writer.close()


def _refusal(status: int, body: bytes) -> str:
    """A status and the message of OpenAI's error object, if the body is one."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {status}"
    return f"status {status}: {message[:200]}"


def _reason(error: Exception) -> str:
    """The message of an exception, or its name if it has none."""
    return str(error).strip() or type(error).__name__


def _take(piece: Any, answer: Answer, now: float) -> None:
    if "error" in piece:
        answer.error = str(piece["error"].get("message", "error"))
    if piece.get("choices"):
        answer.tokens.append(now)
    usage = piece.get("usage")
    if usage:
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
