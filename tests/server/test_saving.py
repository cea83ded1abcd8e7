"""States of streams and chats, and chats that continue from them."""

from dataclasses import replace

import httpx
import openai
import pytest
from live_server import running
from tokenizer_files import TOKENIZERS, tokenizer_of, written

from penstock.errors import PenstockError, RangeError
from penstock.models import CausalLM, gla
from penstock.models.tokenizer_json import HuggingFace
from penstock.server.continuation import NotContinuable, continuation, without_overlap
from penstock.server.limits import Limits
from penstock.server.protocol import Message
from penstock.server.templates import JinjaTemplate, WorldTemplate

HI, BYE = ({"role": "user", "content": text} for text in ("Hi", "Bye"))
FIRST, NEXT = b"User: Hi\n\nAssistant:", b"\n\nUser: Bye\n\nAssistant:"
STOP = ("\n\nUser:",)
ENDPOINTS = {
    "completions": (lambda client: client.completions, {"model": "tiny", "prompt": FIRST.decode(), "stop": STOP[0]}),
    "chat": (lambda client: client.chat.completions, {"model": "tiny", "messages": [HI]}),
}


@pytest.fixture(params=ENDPOINTS)
def create(request, client):
    """Send a request to an endpoint."""
    find, base = ENDPOINTS[request.param]

    def call(extra=None, **given):
        return find(client).create(**base, **given, extra_body=extra)

    return call


def last_states(pieces):
    """Of a stream, by the index of a choice. They are in its last piece with choices."""
    with_choices = [one for one in pieces if one.choices]
    assert not any(hasattr(choice, "state") for one in with_choices[:-1] for choice in one.choices)
    assert all(choice.finish_reason is None for choice in with_choices[-1].choices)
    return {choice.index: choice.state for choice in with_choices[-1].choices}


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_states_of_whole_answers_and_streams_go_on_alike(create, client, expected, stream, usage):
    given = {"n": 2, "seed": 5, "max_tokens": 9, "temperature": 1.0}
    wanted = expected(FIRST.decode(), stop=STOP, **given).completions
    options = {"stream_options": {"include_usage": usage}} if stream else {}
    answer = create({"save_state": True}, stream=stream, **given, **options)
    if stream:
        pieces = list(answer)
        states = last_states(pieces)
        assert (pieces[-1].usage is not None) == usage
    else:
        states = {choice.index: choice.state for choice in answer.choices}
    assert len({*states.values()}) == 2
    for index, state in states.items():
        found = client.completions.create(model="tiny", prompt=" more", max_tokens=20, temperature=0, extra_body={"state": state})
        tokens = [*FIRST, *wanted[index].tokens, *b" more"]
        assert found.choices[0].text == expected(tokens, max_tokens=20, temperature=0).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_state_that_cannot_be_kept_leaves_the_answer(create, live, monkeypatch, stream):
    def full(*_):
        raise PenstockError("save_state: the disk must have room.")

    monkeypatch.setattr(live.engine, "save_state", full)
    found = create({"save_state": True}, stream=stream, max_tokens=3)
    choice = list(found)[-1].choices[0] if stream else found.choices[0]
    assert not hasattr(choice, "state")
    assert "the disk must have room" in choice.state_error["message"]


FEW = {"max_tokens": 9, "temperature": 0}
ENDS = {
    "length": (FEW, {"ignore_eos": True}, {"ignore_end": True}),
    "stop": ({**FEW, "logit_bias": {"256": 100}}, {"min_tokens": 4}, {"min_tokens": 4, "logit_bias": {256: 100}}),
}


@pytest.mark.parametrize("reason", ENDS)
def test_a_chat_goes_on_with_the_new_messages_only(client, expected, reason):
    given, extra, params = ENDS[reason]
    first = client.chat.completions.create(model="tiny", messages=[HI], **given, extra_body={**extra, "save_state": True}).choices[0]
    assert first.finish_reason == reason
    tokens = expected(FIRST.decode(), stop=STOP, **{**given, **params}).tokens
    assert (tokens[-1] == 256) == (reason == "stop")
    whole = [*FIRST, *(tokens[:-1] if reason == "stop" else tokens), *NEXT]
    for stream in (False, True):
        state, more = first.state, {"model": "tiny", "messages": [BYE], "max_tokens": 20, "temperature": 0}
        answer = client.chat.completions.create(**more, extra_body={"state": state}, stream=stream)
        pieces = answer if stream else [answer]
        text = "".join((one.choices[0].delta if stream else one.choices[0].message).content or "" for one in pieces)
        assert text == expected(whole, stop=STOP, max_tokens=20, temperature=0).text.lstrip()
        if not stream:
            assert answer.usage.prompt_tokens == len(NEXT)


def test_what_ended_an_answer_is_not_written_again(client, expected):
    """The stop text of the template is in the state."""
    tokens, added = [*FIRST, *b" Hello\n\nUser:"], b" Bye\n\nAssistant:"
    given = {"max_tokens": 1, "logit_bias": {"58": 100}, "extra_body": {"save_state": True}}
    state = client.completions.create(model="tiny", prompt=tokens[:-1], **given).choices[0].state
    given = {"max_tokens": 20, "temperature": 0}
    found = client.chat.completions.create(model="tiny", messages=[BYE], **given, extra_body={"state": state})
    assert found.usage.prompt_tokens == len(added)
    assert found.choices[0].message.content == expected([*tokens, *added], stop=STOP, **given).text.lstrip()


def test_a_special_token_that_ended_an_answer_is_not_written_again(tmp_path):
    """It has no text, and the template writes it after each message."""
    file = written(tmp_path, ["the cat"])["bytes"]
    file.with_name("tokenizer_config.json").unlink()  # which has it as the end of text
    tokenizer, sent = HuggingFace(file), []
    end = tokenizer.special_tokens["<end>"]
    model = CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1)).eval()
    template = JinjaTemplate("{% for one in messages %}{{ one.content }}<end>{% endfor %}")
    given = {"model": "tiny", "max_tokens": 3, "temperature": 0, "stop": "<end>", "logit_bias": {str(end): 100}}
    with running(model, template=template, tokenizer=tokenizer) as live:
        submit = live.engine.submit
        live.engine.submit = lambda *more, **options: sent.append(submit(*more, **options)) or sent[-1]
        first = live.client.chat.completions.create(messages=[HI], **given, extra_body={"save_state": True}).choices[0]
        live.client.chat.completions.create(messages=[BYE], **given, extra_body={"state": first.state})
    assert (first.finish_reason, first.message.content) == ("stop", "")
    assert sent[0].prompt == tokenizer.encode("Hi<end>")
    assert sent[1].prompt == [*sent[0].prompt, end, *tokenizer.encode("Bye<end>")]


@pytest.fixture(scope="module", params=TOKENIZERS)
def spaced(request, tmp_path_factory):
    """A server with a tokenizer, whose model writes "the", and the requests that its engine gets."""
    tokenizer = tokenizer_of(request.param, tmp_path_factory.mktemp("tokenizers"))
    model = CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1)).eval()
    with running(model, template=JinjaTemplate("{% for one in messages %}{{ one.content }},{% endfor %}"), tokenizer=tokenizer) as live:
        submit, sent, bias = live.engine.submit, [], {tokenizer.encode("a the")[-1]: 100.0}

        def changed(prompt, params, **more):
            sent.append(submit(prompt, replace(params, logit_bias=bias), **more))
            return sent[-1]

        live.engine.submit = changed
        yield live, sent


def test_texts_after_a_state_get_no_space_before_them(spaced):
    """In chats and responses they begin with the comma that the template writes after an answer."""
    live, sent = spaced
    tokenizer, client = live.engine.tokenizer, live.client
    given, kept = {"model": "tiny", "max_tokens": 1, "temperature": 0}, {"extra_body": {"save_state": True}}

    def whole():
        """The text of the last prompt, and that of the sequence which it continues."""
        *_, earlier, last = sent
        return tokenizer.decode(last.prompt), tokenizer.decode([*earlier.prompt, *earlier.result.tokens])

    for text in "s sat", " sat":
        state = client.completions.create(prompt="cat", **given, **kept).choices[0].state
        found = client.completions.create(prompt=text, **given, extra_body={"state": state}, echo=True).choices[0].text
        last, before = whole()
        assert (last, found[: len(text)]) == (before + text, text)
        tokens = sent[-1].prompt[len(sent[-2].prompt) + 1 :]
        assert client.completions.create(prompt=tokens, **given, extra_body={"state": state}, echo=True).choices[0].text == found
    state = client.chat.completions.create(messages=[HI], **given, **kept).choices[0].state
    client.chat.completions.create(messages=[BYE], **given, extra_body={"state": state})
    last, before = whole()
    assert last == f"{before},Bye,"
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=1, temperature=0)
    client.responses.create(model="tiny", input="Bye", max_output_tokens=1, temperature=0, previous_response_id=first.id)
    last, before = whole()
    assert last == f"{before},Bye,"


CHATML = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% else %}[default]{% endif %}{% for one in messages %}"
    "{% if not (loop.first and one.role == 'system') %}<|{{ one.role }}|>{{ one.content | trim }}<|end|>{{ '\\n' }}{% endif %}{% endfor %}"
    "<|assistant|>"
)


def after(template, messages, before):
    return without_overlap(continuation(template.render, messages), before)


def test_the_continuation_of_a_jinja_template():
    template = JinjaTemplate(CHATML)
    messages = [Message(**BYE)]
    assert after(template, messages, "Hello") == "<|end|>\n<|user|>Bye<|end|>\n<|assistant|>"
    assert after(template, messages, "Hello<|end|>") == "\n<|user|>Bye<|end|>\n<|assistant|>"
    assert after(template, messages, "") == "<|end|>\n<|user|>Bye<|end|>\n<|assistant|>"
    several = [Message(role="system", content="Be brief."), Message(role="user", content="<|end|>")]
    assert after(template, several, "") == "<|end|>\n<|system|>Be brief.<|end|>\n<|user|><|end|><|end|>\n<|assistant|>"
    assert after(WorldTemplate(), messages, "a\n\nUs") == "\n\nUser: Bye\n\nAssistant:"[4:]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[-1].content }}",
        "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}",
        "{% for one in messages if one.role == 'system' %}{{ one.content }}{% endfor %}"
        "{% for one in messages %}{{ one.content }}{% endfor %}",
    ],
    ids=["last", "questions", "system first"],
)
def test_messages_that_do_not_come_after_an_answer_are_refused(source):
    with pytest.raises(NotContinuable):
        continuation(JinjaTemplate(source).render, [Message(role="system", content="Be brief."), Message(**BYE)])


def test_a_template_that_refuses_the_messages():
    template = JinjaTemplate("{% for one in messages %}{% if one.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}")
    with pytest.raises(RangeError, match="chat: messages must be what the model's chat template takes"):
        continuation(template.render, [Message(role="system", content="a")])


def test_states_that_are_absent_or_too_many_are_refused(create):
    with pytest.raises(openai.NotFoundError, match="the state must be one that the server keeps"):
        create({"state": "state-1-" + "0" * 32})


def test_too_many_states(model):
    with running(model, Limits(states=2)) as live:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [HI]})):
            answer = httpx.post(f"{live.url}/v1/{path}", json={"model": "tiny", "n": 3, "save_state": True, "max_tokens": 1, **body})
            assert answer.status_code == 400
            assert "save_state must be of at most 2 completions, got 3" in answer.json()["error"]["message"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_requests_that_the_template_cannot_continue_are_refused(model, api):
    source = "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"
    with running(model, template=JinjaTemplate(source)) as live:
        if api == "chat":
            create = live.client.chat.completions.create
            state = create(model="tiny", messages=[HI], max_tokens=2, extra_body={"save_state": True}).choices[0].state
            with pytest.raises(openai.BadRequestError, match="such that the chat template writes all of them after an earlier answer"):
                create(model="tiny", messages=[BYE], max_tokens=2, extra_body={"state": state})
        else:
            create = live.client.responses.create
            first = create(model="tiny", input="Hi", max_output_tokens=2)
            with pytest.raises(openai.BadRequestError, match="because the model's chat template does not write an earlier answer once"):
                create(model="tiny", input="Bye", max_output_tokens=2, previous_response_id=first.id)
