"""Errors are short, whatever a request has."""

import json

import httpx
import pytest

LONG = "x" * 200_000
MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "a"},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "a"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 1},
    "/tokenize": {"model": "tiny", "prompt": "a"},
    "/detokenize": {"model": "tiny", "tokens": []},
}
TOOL = {"type": "function", "function": {"name": "a"}}
WRONG = {
    "model": {"model": LONG},
    "state": {"state": LONG},
    "previous_response_id": {"previous_response_id": LONG},
    "number": {"temperature": LONG},
    "name": {LONG: 1},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
    "type of a schema": {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": LONG}}}]},
    "tool_call_id": {"messages": [{"role": "tool", "content": "a", "tool_call_id": LONG}]},
    "variable": {"chat_template_kwargs": {LONG: 1}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", WRONG)
def test_errors_do_not_repeat_long_values(live, client, path, name):
    answer = httpx.post(live.url + path, json={**BODIES[path], **WRONG[name]}, timeout=60)
    assert answer.status_code in (400, 404)
    assert "must " in answer.json()["error"]["message"]
    assert len(answer.content) < 1000, answer.text[:300]


@pytest.mark.parametrize("path", ["/none", "/v1/models", "/v1/states", "/v1/responses"])
def test_errors_do_not_repeat_long_paths(live, client, path):
    answer = httpx.get(f"{live.url}{path}/{LONG[:10_000]}")
    assert answer.status_code == 404
    assert len(answer.content) < 1000, answer.text[:300]


@pytest.mark.parametrize("path", [*BODIES, "/v1/states"])
@pytest.mark.parametrize("coding", ["gzip", "br, gzip", "identity"])
def test_a_compressed_body_is_refused_by_its_header(live, client, path, coding):
    body = json.dumps(BODIES.get(path, {}) | {"none": 1})
    media = "application/octet-stream" if path == "/v1/states" else "application/json"
    answer = httpx.post(live.url + path, content=body, headers={"content-type": media, "content-encoding": coding})
    message = answer.json()["error"]["message"]
    if coding == "identity":
        assert answer.status_code == 400
        assert "ontent-Encoding" not in message
    else:
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
        assert f"must not be compressed, got Content-Encoding: '{coding}'. Send it as it is." in message


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/other"])
def test_head_answers_as_get_without_a_body(live, path):
    got, asked = httpx.get(live.url + path), httpx.head(live.url + path)
    assert asked.content == b""
    assert (asked.status_code, asked.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    assert path == "/metrics" or asked.headers["content-length"] == got.headers["content-length"]
