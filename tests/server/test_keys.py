"""Several keys: what belongs to one of them, what each may use, and the file that they are in."""

import signal
import time

import httpx
import openai
import pytest
from live_server import process, running, save_checkpoint

from penstock.errors import RangeError
from penstock.server.errors import Refused
from penstock.server.keys import Keys
from penstock.server.quotas import Bucket, Quota

ONE, OTHER, LIMITED = "one-secret", "other-secret", "limited-secret"
FILE = f"""# name key limits
one {ONE} priority=-2

  # of another team
other\t{OTHER}
limited {LIMITED} requests_per_minute=3 tokens_per_minute=100
"""
PROMPTS = {
    "/v1/completions": {"model": "tiny", "prompt": "a" * 100},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a" * 100}]},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(FILE)
    return Keys.read(file)


@pytest.fixture(scope="module")
def served(model, keys):
    with running(model, keys=keys) as live:
        yield live


def asked(live, method, path, key, **given):
    return httpx.request(method, live.url + path, headers={"authorization": f"Bearer {key}"}, timeout=60, **given)


def generated(live, path, key, **more):
    return asked(live, "POST", path, key, json={**PROMPTS[path], "max_tokens": 2, "ignore_eos": True, "seed": 1, **more})


def test_a_key_of_the_file_is_needed(served):
    for right in (ONE, OTHER):
        assert asked(served, "GET", "/v1/models", right).status_code == 200
    for wrong in ("x", "one", ONE[:-1], ONE + "x", f"{ONE} x", "é", "#"):
        answer = httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {wrong}".encode()})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Basic {ONE}"}).status_code == 401


def test_states_belong_to_the_key_that_made_them(served):
    saved = generated(served, "/v1/completions", ONE, save_state=True).json()["choices"][0]["state"]
    content = asked(served, "GET", f"/v1/states/{saved}", ONE)
    assert content.status_code == 200
    sent = asked(served, "POST", "/v1/states", OTHER, content=content.content).json()["id"]
    for key, own, foreign in ((ONE, saved, sent), (OTHER, sent, saved)):
        assert [card["id"] for card in asked(served, "GET", "/v1/states", key).json()["data"]] == [own]
        for method in ("GET", "DELETE"):
            assert asked(served, method, f"/v1/states/{foreign}", key).status_code == 404
        assert generated(served, "/v1/completions", key, state=foreign).json()["error"]["code"] == "state_not_found"
        assert generated(served, "/v1/completions", key, state=own).status_code == 200
    for key, own in ((ONE, saved), (OTHER, sent)):
        assert asked(served, "DELETE", f"/v1/states/{own}", key).status_code == 200


def test_responses_belong_to_the_key_that_made_them(served):
    given = {"model": "tiny", "input": "a", "max_output_tokens": 2}
    name = asked(served, "POST", "/v1/responses", ONE, json=given).json()["id"]
    for key, status in (OTHER, 404), (ONE, 200):
        assert asked(served, "POST", "/v1/responses", key, json={**given, "previous_response_id": name}).status_code == status
        for method, path in ("GET", ""), ("GET", "/input_items"), ("DELETE", ""):
            assert asked(served, method, f"/v1/responses/{name}{path}", key).status_code == status
    assert asked(served, "POST", "/v1/responses", OTHER, json={**given, "priority": -1}).status_code == 403


def test_responses_of_one_salt_read_its_prefixes_only(live):
    given = {"model": "tiny", "input": "c" * 100, "max_output_tokens": 1, "store": False}
    found = [httpx.post(f"{live.url}/v1/responses", json={**given, "cache_salt": salt}).json()["usage"] for salt in ("x", "y", "x")]
    assert [one["input_tokens_details"]["cached_tokens"] for one in found] == [0, 0, 64]


def test_states_of_one_key_do_not_drop_those_of_another(model, keys, tmp_path):
    from penstock.server.limits import Limits

    with running(model, Limits(states=2), keys=keys, states_folder=tmp_path) as live:
        first = generated(live, "/v1/completions", ONE, save_state=True).json()["choices"][0]["state"]
        for _ in range(3):
            generated(live, "/v1/completions", OTHER, save_state=True)
        assert [card["id"] for card in asked(live, "GET", "/v1/states", ONE).json()["data"]] == [first]
        assert len(asked(live, "GET", "/v1/states", OTHER).json()["data"]) == 2


@pytest.mark.parametrize("path", PROMPTS)
def test_kept_prefixes_serve_one_key_and_one_salt(served, path):
    """And answers are the same."""
    texts, prompt = set(), {"prompt": "b" * 100} if "chat" not in path else {}
    for key, salt, cached in [
        (ONE, None, 0), (ONE, None, 64), (OTHER, None, 0), (ONE, "a", 0), (ONE, "a", 64), (OTHER, "a", 0), (ONE, "b", 0), (OTHER, "a", 64),
    ]:  # fmt: skip
        answer = generated(served, path, key, cache_salt=salt and path + salt, temperature=0, **prompt).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached, (key, salt)
        texts.add(str(answer["choices"]))
    assert len(texts) == 1


@pytest.mark.parametrize("path", PROMPTS)
def test_salts_separate_clients_without_keys_too(live, path):
    found = [
        httpx.post(live.url + path, json={**PROMPTS[path], "max_tokens": 1, "cache_salt": path + salt}).json()["usage"]
        for salt in ("a", "b", "a")
    ]
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in found] == [0, 0, 64]
    assert httpx.post(live.url + path, json={**PROMPTS[path], "cache_salt": ""}).status_code == 400


@pytest.mark.parametrize("path", PROMPTS)
def test_who_may_be_more_urgent(served, path):
    for key, priority, status in ((ONE, -2, 200), (ONE, -3, 403), (OTHER, -1, 403), (OTHER, 1000, 200), (OTHER, 1001, 400)):
        answer = generated(served, path, key, priority=priority)
        assert answer.status_code == status, answer.text
    assert "priority must be at least 0 with this key, got -1" in generated(served, path, OTHER, priority=-1).json()["error"]["message"]


@pytest.mark.parametrize("path", PROMPTS)
def test_requests_and_tokens_of_a_minute(model, tmp_path, path):
    (tmp_path / "keys").write_text(f"requests {ONE} requests_per_minute=3\ntokens {OTHER} tokens_per_minute=1000\n")
    with running(model, keys=Keys.read(tmp_path / "keys")) as live:
        for left in (2, 1, 0):
            answer = generated(live, path, ONE)
            assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "3")
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert "x-ratelimit-limit-tokens" not in answer.headers
        answer = generated(live, path, ONE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 10 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")

        used = generated(live, path, OTHER).json()["usage"]["total_tokens"]
        answer = generated(live, path, OTHER, max_tokens=870)  # what a request reserves and does not use comes back
        assert answer.status_code == 429, "together they are too many"
        assert float(answer.headers["x-ratelimit-remaining-tokens"]) in range(1000 - used, 1000 - used + 100)
        assert generated(live, path, OTHER, max_tokens=5000 // 16, n=16).status_code == 400
        with pytest.raises(openai.RateLimitError, match="tokens of a key must be at most 1000 a minute, got more"):
            live.client.with_options(api_key=OTHER).completions.create(model="tiny", prompt="a" * 100, max_tokens=890)


def test_refused_requests_use_no_tokens():
    quota = Quota(tokens=100)
    quota.take_tokens(90, "f")
    with pytest.raises(Refused):
        quota.take_tokens(20, "f")
    quota.give_back(10)
    quota.take_tokens(20, "f")


def test_a_bucket_fills_evenly_and_holds_a_minute():
    now = [0.0]
    bucket = Bucket("requests", 6, lambda: now[0])
    bucket.take(6)
    assert bucket.wait(1) == 10
    now[0] = 25.0
    assert bucket.wait(2) == 0
    now[0] = 1000.0
    assert bucket.left == 6


WRONG = {
    "one word": ("a", "line 1 of api_key_file must be NAME KEY [requests_per_minute=N]"),
    "name": ("# a\n\na/b secret-key", "line 3 of api_key_file must be a name of 1 to 64 letters"),
    "too short": ("a 1234567", "a key of 8 to 512 ASCII characters, got a key of 7 characters"),
    "not ascii": ("a sécret-key", "a key of 8 to 512 ASCII characters"),
    "name twice": ("a secret-key\nb secret-2\na secret-3", "line 3 of api_key_file must be a name that no other line has, got that of"),
    "key twice": ("a secret-key\nb secret-key", "line 2 of api_key_file must be a key that no other line has, got that of line 1"),
    "option": ("a secret-key tokens=5", "another word after the key"),
    "number": ("a secret-key tokens_per_minute=0", "tokens_per_minute of at least 1, got 0"),
    "option twice": ("a secret-key priority=-1 priority=-1", "priority twice"),
    "priority": ("a secret-key priority=1", "priority from -1000 to 0"),
    "none": ("# a secret-key\n", "api_key_file must have at least one key, got none"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused_by_line_and_without_keys(tmp_path, name):
    content, message = WRONG[name]
    (tmp_path / "keys").write_text(content)
    with pytest.raises(RangeError) as caught:
        Keys.read(tmp_path / "keys")
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_keys_are_in_no_repr(keys):
    shown = repr(keys) + repr(keys._found) + repr(vars(keys))
    assert not any(secret in shown for secret in (ONE, OTHER, LIMITED))


def test_a_file_is_read_again_and_one_with_an_error_is_not(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text(FILE)
    keys = Keys.read(file)
    keys.check(f"Bearer {LIMITED}").quota.take_request()
    file.write_text("new new-secret\nlimited rotated-secret requests_per_minute=3 tokens_per_minute=100\n")
    keys.reread()
    assert keys.check("bearer new-secret").name == "new"
    assert int(keys.check("Bearer rotated-secret").quota.headers()["x-ratelimit-remaining-requests"]) == 2
    file.write_text("wrong")
    keys.reread()
    assert "line 1 of api_key_file" in caplog.text
    assert keys.check("Bearer new-secret").name == "new"
    with pytest.raises(Refused):
        keys.check(f"Bearer {ONE}")
    assert "secret" not in caplog.text


def test_sighup_reads_the_file_of_a_server_again(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"one {ONE}")
    save_checkpoint(tmp_path / "small")
    with process(tmp_path / "small", "--api-key-file", str(file)) as (server, url, _):

        def status(key):
            return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status(ONE), status(OTHER)) == (200, 401)
        file.write_text(f"other {OTHER}")
        server.send_signal(signal.SIGHUP)
        for _ in range(500):
            if status(OTHER) == 200:
                break
            time.sleep(0.01)
        assert (status(ONE), status(OTHER)) == (401, 200)


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_an_answer_is_sent_although_its_key_can_have_no_folder_of_states(model, keys, tmp_path, kind):
    with running(model, keys=keys, states_folder=tmp_path / "absent") as live:
        given = {"messages": [{"role": "user", "content": "a"}]} if kind == "chat/completions" else {"prompt": "a"}
        body = {"model": "tiny", "max_tokens": 1, "save_state": True, **given}
        answer = httpx.post(f"{live.url}/v1/{kind}", json=body, headers={"Authorization": f"Bearer {ONE}"})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["state_error"]["code"] == "states_folder"
        assert httpx.get(f"{live.url}/v1/states", headers={"Authorization": f"Bearer {ONE}"}).status_code == 500
