"""Web pages of other origins: preflight requests come without the key, and pages read errors too."""

import httpx
import pytest
from live_server import KEY, running

from penstock.errors import RangeError
from penstock.server import app
from penstock.server.origins import ORIGINS

PAGE = "https://example.org"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "a", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def keyed(model):
    with running(model, api_key=KEY, origins=["http://localhost:5173", PAGE]) as live:
        yield live


@pytest.fixture(scope="module")
def free(model):
    with running(model, origins=["*"]) as live:
        yield live


@pytest.mark.parametrize("path", [*BODIES, "/v1/models", "/health"])
def test_a_preflight_request_needs_no_key(keyed, path):
    answer = httpx.options(keyed.url + path, headers={"Origin": PAGE, **ASKED})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert answer.headers["access-control-allow-headers"] == ASKED["Access-Control-Request-Headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    other = httpx.options(keyed.url + path, headers={"Origin": "https://example.com", **ASKED})
    assert (other.status_code, other.headers.get("access-control-allow-origin")) == (400, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_answers_and_errors_can_be_read_by_the_page(keyed, monkeypatch, path, stream):
    body, key = {**BODIES[path], "stream": stream}, {"Authorization": f"Bearer {KEY}"}
    found = {}

    def post(headers=key, origin=PAGE, **more):
        answer = httpx.post(keyed.url + path, headers={"Origin": origin, **headers}, **{"json": body, **more})
        assert answer.headers.get("access-control-allow-origin") == (PAGE if origin == PAGE else None)
        found[answer.status_code] = answer

    post()
    post(headers={})
    post(json={**body, "model": "huge"})
    post(content=b"a" * (keyed.service.limits.body_bytes + 1))
    monkeypatch.setattr(app, path.split("/")[2], None)
    post()
    assert set(found) == {200, 401, 404, 413, 500}
    for answer in found.values():
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"X-Request-Id", "Retry-After", "X-RateLimit-Remaining-Tokens"} <= {*exposed}
        assert "Origin" in answer.headers["vary"]
    post(origin="https://example.com")


def test_every_origin_and_none(free, live):
    for server, wanted in ((free, "*"), (live, None)):
        answer = httpx.post(f"{server.url}/v1/completions", json=BODIES["/v1/completions"], headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, wanted)
        asked = httpx.options(f"{server.url}/v1/completions", headers={"Origin": PAGE, **ASKED})
        assert (asked.status_code, asked.headers.get("access-control-allow-origin")) == (200 if wanted else 405, wanted)


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://Example.org", "https://example.org/a", "", "**"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(RangeError, match="serve: allow_origin must be an origin such as https://"):
        ORIGINS.check("serve", ["*", "null", "http://[::1]:80", origin])
