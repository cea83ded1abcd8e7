"""What the server takes from one client, and how bodies are read within that."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from ..errors import shortened
from .bodies import Body
from .caller import LARGE, current
from .errors import Refused, invalid_body
from .processes import Processes

B = TypeVar("B", bound=Body)
FREE = ("tools", "functions", "response_format", "text", "output_config", "chat_template_kwargs")
"""Fields with objects of any form. They are read from worker processes, in one go."""
DISCARDED_BYTES = 2**28
"""Of a body that is too large, this much is read and dropped: most clients read no answer before they have sent everything."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one request. The engine bounds the queue (``Engine.max_queue``)."""

    body_bytes: int = 2**22
    body_seconds: float = 30
    """Time to send a body."""
    prompt_tokens: int = 2**17
    all_tokens: int = 2**19
    """Tokens of all prompts of a request."""
    max_tokens: int = 4096
    """Generated tokens of a completion."""
    prompts: int = 64
    """Prompts in one request."""
    n: int = 16
    """Completions of a prompt."""
    stops: int = 16
    stop_length: int = 256
    """Characters of a stop text."""
    stop_ids: int = 1024
    biases: int = 1024
    messages: int = 1024
    parts: int = 1024
    """Parts of the contents of all messages."""
    schema_bytes: int = 2**16
    tools: int = 128
    tool_bytes: int = 2**18
    """Of the names, descriptions and schemas of all tools."""
    values: int = 2**15
    """Of objects in tools, schemas and variables of templates."""
    calls: int = 1024
    """Calls of tools in all messages."""
    schema_levels: int = 64
    schema_patterns: int = 64
    """Names in ``patternProperties``, each of which is compared with all others: 100 take a tenth of a second, 500 minutes."""
    schema_seconds: float = 10
    """From the end of a body until its schema is compiled. Two are compiled at a time."""
    answer_bytes: int = 2**24
    """Of an answer, by an estimate before it is begun."""
    seconds: float = 600
    """From the last byte of a body to the last token."""
    states: int = 64
    """States that are kept; the least recently used one is dropped."""
    state_bytes: int = 2**28
    """Bytes of a state that is sent."""


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body. Raises Refused if it is too large, too slow or compressed."""
    try:
        content = await asyncio.wait_for(_read(request, limit), seconds)
    except asyncio.TimeoutError:
        message = f"server: the body must arrive within {seconds:g} seconds, got a part of it."
        raise Refused(408, message, code="timeout", headers={"Connection": "close"}) from None
    for coding in request.headers.getlist("content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            message = f"server: the body must not be compressed, got Content-Encoding: {shortened(coding)}. Send it as it is."
            raise Refused(415, message, code="compressed_body", headers={"Accept-Encoding": "identity"})
    return content


async def _read(request: Request, limit: int) -> bytes:
    body, size = bytearray(), 0
    declared = request.headers.get("content-length", "")
    if int(declared or 0) > limit and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(limit, declared)  # the client waits for an answer before it sends anything
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            body += piece
        elif size > DISCARDED_BYTES:
            break
    if size > limit:
        got = f"more than {DISCARDED_BYTES}" if size > DISCARDED_BYTES else str(size)
        raise _too_large(limit, got)
    return bytes(body)


def check_state_type(request: Request) -> None:
    """Raise Refused for a body that is no file by its content type. curl sends all bodies as forms by itself; those of a web page, which
    another origin may send without being asked, have an Origin.
    """
    media = _media(request)
    if media in ("", "application/octet-stream") or (media == "application/x-www-form-urlencoded" and "origin" not in request.headers):
        return
    remedy = "Send the header Content-Type: application/octet-stream."
    raise Refused(415, f"states: the content type must be application/octet-stream, got {shortened(media)}. {remedy}")


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_large(limit: int, got: str) -> Refused:
    message = f"server: the body must be at most {limit} bytes, got {got}."
    return Refused(413, message, code="request_too_large", headers={"Connection": "close"})


def _check_counts(data: Any, function: str, limits: Limits) -> None:
    """Raise Refused for too many items. Before items are validated, because millions of them take seconds."""
    if not isinstance(data, dict):
        return
    prompt, name = data.get("prompt"), "input" if "input" in data else "messages"
    messages = _items(data.get(name))
    tokens = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    lists = prompt if isinstance(prompt, list) and not tokens else ()
    turns = [one for one in messages if isinstance(one, dict)]
    contents = [_items(one.get(field)) for one in turns for field in ("content", "output", "summary")]
    contents.append(_items(data.get("system")))
    contents += [_items(part.get("content")) for content in contents for part in content if isinstance(part, dict)]
    counts = [
        ("prompts", 0 if tokens else len(_items(prompt)), limits.prompts, "prompt"),
        ("tokens of a prompt", len(prompt) if isinstance(prompt, list) and tokens else 0, limits.prompt_tokens, "prompt"),
        ("tokens of all prompts", sum(len(_items(one)) for one in lists[: limits.prompts]), limits.all_tokens, "prompt"),
        ("messages", len(messages), limits.messages, name),
        ("parts of messages", sum(map(len, contents)), limits.parts, name),
        ("tools", len(_items(data.get("tools"))), limits.tools, "tools"),
        ("calls of tools", sum(len(_items(one.get("tool_calls"))) for one in turns), limits.calls, "messages"),
        ("stop texts", len(_items(data.get("stop"))), limits.stops, "stop"),
        ("stop texts", len(_items(data.get("stop_sequences"))), limits.stops, "stop_sequences"),
        ("stop tokens", len(_items(data.get("stop_token_ids"))), limits.stop_ids, "stop_token_ids"),
        ("biases", len(_items(data.get("logit_bias"))), limits.biases, "logit_bias"),
    ]
    for field in FREE:
        counts.append((f"values in {field}", _values(data.get(field), limits.values), limits.values, field))
    for name, count, most, param in counts:
        if count > most:
            raise Refused(400, f"{function}: the number of {name} must be at most {most}, got {count}.", param=param)


def _values(value: Any, most: int) -> int:
    """Numbers, texts, lists and objects in a value; if there are more than ``most`` of them, at least one more."""
    count, left = 0, [value]
    while left and count <= most:
        one = left.pop()
        found = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        count += len(found)
        left += found if len(found) <= most else ()
    return count


def _items(value: Any) -> Any:
    return value if isinstance(value, list | dict) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {shortened(twice)} twice in an object")
    return found


async def parsed(request: Request, kind: type[B], function: str, limits: Limits, processes: Processes) -> B:
    """The body as JSON of a kind. Raises Refused. What a large body needs from here on is done by worker processes."""
    content = await read_body(request, limits.body_bytes, limits.body_seconds)
    media = _media(request)
    if media != "application/json":
        remedy = "Send the header Content-Type: application/json."
        raise Refused(415, f"{function}: the content type must be application/json, got {shortened(media)}. {remedy}")
    current().size = len(content)
    if len(content) < LARGE:
        return _parsed(content, kind, function, limits)
    return await processes.run(_parsed, content, kind, function, limits)


def _parsed(content: bytes, kind: type[B], function: str, limits: Limits) -> B:
    try:
        data = json.loads(content.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise Refused(400, f"{function}: the body must be UTF-8, got byte {content[error.start]:#04x} at {error.start}.") from None
    except json.JSONDecodeError as error:
        raise Refused(400, f"{function}: the body must be JSON, got {error.msg} at {error.pos}.") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; thousands of brackets; names twice
        raise Refused(400, f"{function}: the body must be plain JSON, got {error}.") from None
    _check_counts(data, function, limits)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise invalid_body(function, error) from None
    except RecursionError as error:
        raise Refused(400, f"{function}: the body must be plain JSON, got {error}.") from None
