"""States over HTTP: saved, listed, continued from, sent and received."""

import errno
import json
import math
import os
import shutil

import httpx
import numpy as np
import openai
import pytest
from live_server import running, small_model
from safetensors import safe_open
from safetensors.numpy import load, save
from state_calls import TEXT, continued, ends, listed, saves

from penstock.server.errors import Refused
from penstock.server.limits import Limits


@pytest.fixture
def saved(client):
    found = client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, temperature=0, extra_body={"save_state": True})
    return found.choices[0]


def test_a_completion_continues_from_a_state(client, live, saved, expected):
    first = expected(TEXT, max_tokens=9, temperature=0)
    tokens = [*TEXT.encode(), *first.tokens, *b" Then"]
    found = continued(client, saved.state)
    assert found.choices[0].text == expected(tokens, max_tokens=20, seed=4).text
    assert found.usage.prompt_tokens == len(" Then")
    assert continued(client, saved.state, "").choices[0].text == expected([*TEXT.encode(), *first.tokens], max_tokens=20, seed=4).text


def test_a_state_goes_to_a_file_and_back(client, live, saved):
    wanted = continued(client, saved.state).choices[0].text
    content = httpx.get(ends(live.url, saved.state)).content
    assert httpx.delete(ends(live.url, saved.state)).json()["deleted"]
    with pytest.raises(openai.NotFoundError) as caught:
        continued(client, saved.state)
    assert caught.value.code == "state_not_found"
    card = httpx.post(f"{live.url}/v1/states", content=content).json()
    assert card["tokens"] == len(TEXT) + 9
    assert card in httpx.get(f"{live.url}/v1/states").json()["data"]
    assert continued(client, card["id"]).choices[0].text == wanted


def test_files_that_do_not_fit_are_refused(client, live, saved):
    content = httpx.get(ends(live.url, saved.state)).content
    for wrong in (b"", b"no", content[:-4], content.replace(b'"model":"', b'"model":"0')[: len(content)]):
        answer = httpx.post(f"{live.url}/v1/states", content=wrong)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert str(live.service.states._folder) not in answer.text
    client.completions.create(model="tiny", prompt="a", max_tokens=1)


def test_a_changed_state_reaches_only_who_asks_for_it(client, live, expected):
    """The engine's cache gives states of prompts to all clients; it takes none from a file."""
    prompt = "Everybody's first words: " * 12
    given = {"model": "tiny", "max_tokens": 70, "seed": 4}
    saved = client.completions.create(**given, prompt="another text" * 9, extra_body={"save_state": True}).choices[0].state
    tensors = load(httpx.get(ends(live.url, saved)).content)
    with safe_open(str(live.service.states._path(saved)), "np") as file:
        about = file.metadata()
    tensors["tokens"] = np.frombuffer(prompt.encode()[:128], np.uint8).astype(np.int64)
    for name in tensors.keys() - {"tokens"}:
        tensors[name] = np.random.default_rng(0).normal(0, 100, tensors[name].shape).astype(tensors[name].dtype)
    content = save(tensors, {**about, "tokens": "128", "aligned": "128"})
    name = httpx.post(f"{live.url}/v1/states", content=content).json()["id"]
    wanted = expected(prompt, max_tokens=70, seed=4).text
    assert client.completions.create(**given, prompt=prompt[128:], extra_body={"state": name}).choices[0].text != wanted
    found = client.completions.create(**given, prompt=prompt)
    assert (found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens) == (wanted, 0)


@pytest.mark.parametrize("change", [(0, 300), (5, -1), (189, 2**40)])
def test_tokens_outside_of_the_vocabulary_are_refused(client, live, saved, tmp_path, change):
    from safetensors import safe_open
    from safetensors.torch import save_file

    (tmp_path / "a").write_bytes(httpx.get(ends(live.url, saved.state)).content)
    with safe_open(str(tmp_path / "a"), "pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    at, token = change
    tensors["tokens"][min(at, len(tensors["tokens"]) - 1)] = token
    save_file(tensors, str(tmp_path / "b"), metadata=about)
    answer = httpx.post(f"{live.url}/v1/states", content=(tmp_path / "b").read_bytes())
    assert answer.status_code == 400
    assert f"the tokens of the file must be from 0 to 256, got {token}." in answer.json()["error"]["message"]


def test_a_state_needs_a_single_prompt_and_has_no_prompt_logprobs(client, saved):
    with pytest.raises(openai.BadRequestError, match="prompt must be a single one with a state"):
        continued(client, saved.state, ["a", "b"])
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be None with a state"):
        client.completions.create(model="tiny", prompt="a", echo=True, logprobs=1, extra_body={"state": saved.state})


def test_the_least_recently_used_state_is_dropped(client, live, saved):
    for _ in range(live.service.limits.states - 1):
        client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"save_state": True})
    continued(client, saved.state)
    client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"save_state": True})
    assert len(httpx.get(f"{live.url}/v1/states").json()["data"]) == live.service.limits.states
    continued(client, saved.state)


def test_a_state_of_several_that_cannot_be_saved_leaves_the_others(model, tmp_path, monkeypatch):
    with running(model, states_folder=tmp_path) as live:
        plain, calls = live.service.engine.save_state, []

        def full(*given):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(*given)

        monkeypatch.setattr(live.service.engine, "save_state", full)
        found = live.client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, n=3, extra_body={"save_state": True})
        assert ["state_error" in choice.model_dump() for choice in found.choices] == [False, True, False]
        for choice in (found.choices[0], found.choices[2]):
            assert continued(live.client, choice.state).choices[0].text
        assert len(list(tmp_path.rglob("*"))) == 2 + 2  # and the server's place for parts, with its lock


@pytest.mark.parametrize("kind", ["link", "link to a state", "folder", "pipe", "copy"])
def test_what_is_no_state_of_the_server_is_not_served(model, tmp_path, kind):
    folder, secret = tmp_path / "states", tmp_path / "secret"
    folder.mkdir()
    secret.write_bytes(b"secret")
    with running(model, Limits(states=2), states_folder=folder) as live:
        name = f"state-1-{0:032}"
        path = folder / f"{name}.safetensors"
        if kind == "link":
            path.symlink_to(secret)
        elif kind == "link to a state":
            shutil.copy(live.service.states._path(saves(live)), secret)
            path.symlink_to(secret)
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            os.link(secret, path)
        before = secret.stat()
        for method in ("GET", *(["DELETE"] if kind != "copy" else [])):
            answer = httpx.request(method, ends(live.url, name), timeout=10)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "state_not_found")
        with pytest.raises(openai.APIStatusError) as caught:
            continued(live.client.with_options(timeout=10), name)
        assert caught.value.status_code == (400 if kind == "copy" else 404)
        assert str(tmp_path) not in str(caught.value)
        assert name not in listed(live)
        for _ in range(3):
            assert continued(live.client, saves(live)).choices[0].text
        assert (secret.exists(), secret.stat().st_mtime_ns == before.st_mtime_ns or kind == "copy") == (True, True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_sent_state_has_finite_numbers(client, live, saved, value):
    content = httpx.get(ends(live.url, saved.state)).content
    tensors = load(content)
    with safe_open(str(live.service.states._path(saved.state)), "np") as file:
        about = file.metadata()
    for name in tensors.keys() - {"tokens"}:
        changed = {key: x.copy() for key, x in tensors.items()}
        changed[name].flat[-1] = value
        answer = httpx.post(f"{live.url}/v1/states", content=save(changed, about))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"load_state: {name} must be finite numbers, got ")
    more = httpx.post(f"{live.url}/v1/states", content=save({**tensors, "more": tensors["tokens"]}, about))
    assert "the tensors of the file must be those of the state alone, got ['more']" in more.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_sent_state_names_it(client, live, saved, stream):
    """Finite numbers may be so large that no logit is."""
    content = httpx.get(ends(live.url, saved.state)).content
    tensors = load(content)
    with safe_open(str(live.service.states._path(saved.state)), "np") as file:
        about = file.metadata()
    changed = {name: x if name == "tokens" else np.full_like(x, 3e38) for name, x in tensors.items()}
    sent = httpx.post(f"{live.url}/v1/states", content=save(changed, about)).json()["id"]
    body = {"model": "tiny", "prompt": "a", "state": sent, "stream": stream}
    answer = httpx.post(f"{live.url}/v1/completions", json=body)
    error = json.loads(answer.text.removeprefix("data: "))["error"] if stream else answer.json()["error"]
    assert answer.status_code == (200 if stream else 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "state")
    assert error["message"].startswith("submit: state must be such that a token may follow")
    assert continued(client, saved.state).choices[0].text


TAKEN = [None, "", "application/octet-stream", "Application/Octet-Stream; a=b", "application/x-www-form-urlencoded"]


@pytest.mark.parametrize("media", [*TAKEN, "application/json", "text/plain", "multipart/form-data; boundary=a", "a" * 5000])
@pytest.mark.parametrize("origin", [{}, {"Origin": "https://example.org"}], ids=["", "page"])
def test_a_sent_state_is_a_file_by_its_content_type(live, saved, media, origin):
    content = httpx.get(ends(live.url, saved.state)).content
    headers = origin if media is None else {"Content-Type": media, **origin}
    answer = httpx.post(f"{live.url}/v1/states", content=content, headers=headers)
    if media in TAKEN and not (origin and "form" in (media or "")):
        assert answer.status_code == 200
    else:
        assert answer.status_code == 415
        assert answer.json()["error"]["message"].endswith("Send the header Content-Type: application/octet-stream.")
        assert len(answer.content) < 1000


LONG = f"state-{'1' * 300}-{0:032}"


@pytest.mark.parametrize(
    "wrong", ["", "../other", "state-1-" + "0" * 32, "state-1-" + "0" * 31 + "/", "/etc/passwd", "\0", "a" * 5000, LONG]
)
def test_names_are_no_paths(live, wrong):
    states = live.service.states
    for method in (states.get, states.content, states.card, states.remove):
        with pytest.raises(Refused, match="must be one that the server keeps"):
            method(wrong)


def test_a_state_of_another_model_is_refused(model, tmp_path):
    changed = small_model()
    changed.head.weight.data += 1
    with running(model, states_folder=tmp_path) as one, running(changed, states_folder=tmp_path) as other:
        with pytest.raises(openai.BadRequestError, match="A state continues with the model that made it only"):
            continued(other.client, saves(one))
        assert len(listed(other)) == 1
