"""States over HTTP: saved, listed, continued from, sent and received."""

import httpx
import openai
import pytest

TEXT = "The sea was calm. " * 10


@pytest.fixture
def saved(client):
    found = client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, temperature=0, extra_body={"save_state": True})
    return found.choices[0]


def ends(url, name):
    return f"{url}/v1/states/{name}"


def continued(client, state, prompt=" Then"):
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=20, seed=4, extra_body={"state": state})


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
    client.completions.create(model="tiny", prompt="a", max_tokens=1)


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
