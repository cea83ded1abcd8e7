"""Server-sent events, of all endpoints that stream."""

import json

import httpx
import pytest

TEXT = "a\x85b\u2028c\u2029d\x0be\x0cf\x1c"
"""Characters that ``str.splitlines`` splits at, as many clients do."""
SCHEMA = {"const": TEXT}
MESSAGES = [{"role": "user", "content": "a"}]
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, "max_tokens": 100}
STREAMS = {
    "/v1/completions": {"prompt": "a", **JSON},
    "/v1/chat/completions": {"messages": MESSAGES, **JSON},
    "/v1/responses": {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "metadata": {"a": TEXT}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("path", STREAMS)
def test_each_event_is_one_line_for_all_clients(live, client, path):
    body = {"model": "tiny", "stream": True, **STREAMS[path]}
    with httpx.stream("POST", live.url + path, json=body, timeout=60) as answer:
        lines = [*answer.iter_lines()]
    assert all(line == "" or line.startswith(("data: ", "event: ")) for line in lines), lines
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [piece for event in events for piece in _texts(event)]
    assert json.loads("".join(deltas)) == TEXT


def _texts(event):
    """The texts that an event adds."""
    if "choices" in event:
        return [one["text"] if "text" in one else one["delta"].get("content") or "" for one in event["choices"]]
    if event["type"] == "response.output_text.delta":
        return [event["delta"]]
    return [event["delta"]["text"]] if event["type"] == "content_block_delta" else []
