"""``/tokenize``, ``/detokenize`` and ``/version``."""

import httpx
import pytest
from fastapi.testclient import TestClient
from live_server import KEY, running

from penstock import __version__
from penstock.engine import Engine
from penstock.models import CausalLM, gla
from penstock.models.tokenizers import Bytes
from penstock.server.app import create_app
from penstock.server.limits import Limits
from penstock.server.service import Service
from penstock.server.templates import WorldTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]


def post(live, path, body, **headers):
    return httpx.post(f"{live.url}/{path}", json=body, headers=headers)


def test_a_text_goes_to_tokens_and_back(live):
    found = post(live, "tokenize", {"model": "tiny", "prompt": "aé", "return_token_strs": True}).json()
    assert found == {
        "count": 3, "max_model_len": 2**17, "tokens": [97, 0xC3, 0xA9], "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
    }  # fmt: skip
    assert post(live, "tokenize", {"prompt": "aé"}).json()["token_strs"] is None
    assert post(live, "detokenize", {"model": "tiny", "tokens": found["tokens"]}).json() == {"prompt": "aé"}
    assert post(live, "detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_tokens_are_those_that_requests_have(live, client):
    for prompt in ("Once upon", ""):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert post(live, "tokenize", {"prompt": prompt}).json()["count"] == usage.prompt_tokens
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage
    found = post(live, "tokenize", {"messages": MESSAGES}).json()
    assert (found["count"], bytes(found["tokens"])) == (usage.prompt_tokens, b"User: Hi\n\nAssistant:")


def test_special_tokens_are_added_on_demand():
    class Marked(Bytes):
        def encode(self, text, special=False, after=()):
            return [256] * special + super().encode(text)

    model = CausalLM(gla(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)).eval()
    service = Service(Engine(model, Marked(257)), "tiny", WorldTemplate(), Limits(prompt_tokens=99))
    with TestClient(create_app(service)) as client:
        for given, wanted in (({"prompt": "a"}, True), ({"messages": MESSAGES}, False)):
            for special in (None, True, False):
                found = client.post("/tokenize", json={**given, "add_special_tokens": special}).json()
                assert (found["tokens"][0] == 256) == (wanted if special is None else special)
                assert found["max_model_len"] == 99


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("tokenize", {}, 400, "tokenize: prompt must be given, or messages, got none"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "tokenize: prompt must be given, or messages, got both"),
        ("tokenize", {"prompt": [1]}, 400, "tokenize: prompt must be a valid string"),
        ("tokenize", {"prompt": "a", "model": "huge"}, 404, "model must be 'tiny', got 'huge'"),
        ("tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, 400, "add_generation_prompt must be true, got False."),
        ("detokenize", {"tokens": [1, 257]}, 400, "tokens must be from 0 to 256, got 257"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens.1 must be greater than or equal to 0, got -1"),
        ("detokenize", {}, 400, "detokenize: tokens must be given, got none"),
    ],
    ids=range(8),
)
def test_wrong_requests_are_refused_by_name(live, path, body, status, message):
    answer = post(live, path, body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_the_key_is_wanted(model):
    with running(model, api_key=KEY, template=None) as live:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [97]})):
            assert post(live, path, body).status_code == 401
            assert post(live, path, body, authorization=f"Bearer {KEY}").status_code == 200
        answer = post(live, "tokenize", {"messages": MESSAGES}, authorization=f"Bearer {KEY}")
        assert "tokenize: the model must have a chat template" in answer.json()["error"]["message"]
        assert httpx.get(f"{live.url}/version").json() == {"version": __version__}
