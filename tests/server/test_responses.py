"""``/v1/responses`` with OpenAI's own client: conversations that continue from kept states."""

import json

import httpx
import openai
import pytest
from live_server import VOCAB, running
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load
from scripted_answers import scripted

from penstock.engine import Engine, SamplingParams
from penstock.models.tokenizers import Bytes
from penstock.server.limits import Limits
from penstock.server.templates import JinjaTemplate

CHATML = """{%- if tools %}<|system|>Tools <tool_call>:{% for one in tools %}{{ one | tojson }}{% endfor %}<|end|>{% endif %}
{%- for one in messages %}<|{{ one.role }}|>
{%- if one.reasoning_content is defined %}<think>{{ one.reasoning_content }}</think>{% endif %}{{ one.content or '' }}
{%- for call in one.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- if one.role == 'tool' %}({{ one.name }}){% endif %}<|end|>
{%- endfor %}<|assistant|>"""
COUNTS = "{% for one in messages %}{{ loop.length }}{{ one.content }}{% endfor %}"


class Weather(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)


TOOL = {"type": "function", "name": "weather", "description": "Tells it", "parameters": Weather.model_json_schema(), "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def chatml(model):
    with running(model, template=JinjaTemplate(CHATML)) as live:
        yield live


def create(live, given="Hi", **more):
    return live.client.responses.create(**{"model": "tiny", "input": given, "max_output_tokens": 30, "temperature": 0, **more})


def tokens_of(live, response):
    content = httpx.get(f"{live.url}/v1/states/{response.id.replace('resp_', 'state-').replace('_', '-')}").content
    return load(content)


def test_turns_are_one_conversation_to_the_bit(model):
    """The state after three turns, and all answers, are those of the same tokens in one prompt."""
    fresh = Engine(model, Bytes(VOCAB), slots=4, token_budget=256, cache_bytes=0, batch_invariant=True)
    with running(model, batch_invariant=True) as live:
        previous, tokens = None, []
        for text in "What is the sea?" * 5, "And the sky?", "Why?" * 30:
            found = create(live, text, previous_response_id=previous, instructions="Be brief.")
            piece = f"\n\nUser: {text}\n\nAssistant:" if tokens else f"System: Be brief.\n\nUser: {text}\n\nAssistant:"
            tokens += piece.encode()
            assert found.usage.input_tokens == len(tokens)
            wanted = fresh.generate(tokens, SamplingParams(max_tokens=30, temperature=0, stop=("\n\nUser:",), keep_state=True))[0]
            assert found.output_text == wanted.text.lstrip()
            kept = tokens_of(live, found)
            done = wanted.completions[0]
            ends = done.tokens and done.tokens[-1] == VOCAB - 1
            tokens += done.tokens[:-1] if ends else done.tokens
            assert kept["tokens"].tolist() == tokens
            assert found.status == ("incomplete" if done.finish_reason == "length" else "completed")
            previous = found.id
    assert found.usage.input_tokens_details.cached_tokens > 64


def test_only_new_tokens_are_computed(chatml):
    first = create(chatml, "A long story. " * 100, max_output_tokens=2)
    before = chatml.engine.stats.prompt_tokens
    second = create(chatml, "And?", previous_response_id=first.id, max_output_tokens=2)
    assert chatml.engine.stats.prompt_tokens - before < 64 + 60
    assert second.usage.input_tokens > 1400
    assert second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens < 64 + 60


@pytest.mark.parametrize("ending", [True, False], ids=["end", "stop text"])
def test_answers_end_with_a_token_or_a_stop_text(live, ending):
    text = "Fine." if ending else "Fine.\n\nUser:"
    with scripted(live.engine, text, "Bye.", "So.", ends=ending) as prompts:
        first = create(live)
        assert (first.output_text, first.status) == ("Fine.", "completed")
        second = create(live, "Go", previous_response_id=first.id)
        create(live, [{"role": "developer", "content": "Now"}], previous_response_id=second.id)
    assert prompts[0] == "User: Hi\n\nAssistant:"
    assert prompts[1] == ("\n\nUser: Go\n\nAssistant:" if ending else " Go\n\nAssistant:")
    assert prompts[2] == "\n\nSystem: Now\n\nAssistant:"
    live.settles()


EVENTS = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
          "output_item.done", "completed"]  # fmt: skip


def test_a_stream_has_the_events_of_openai(live):
    with scripted(live.engine, "Fine.", "Fine."):
        whole = create(live)
        events = list(create(live, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(names)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert (last.output_text, last.status, last.usage) == (whole.output_text, "completed", whole.usage)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert live.client.responses.retrieve(last.id) == last
    with scripted(live.engine, "Fine."), live.client.responses.stream(model="tiny", input="Hi") as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == "Fine."
    assert "response.output_text.done" in kinds
    *_, final = create(live, stream=True, max_output_tokens=1, text={"format": {"type": "json_object"}})
    assert (final.type, final.response.status) == ("response.incomplete", "incomplete")
    assert final.response.incomplete_details.reason == "max_output_tokens"
    raw = live.client.responses.with_raw_response.create(model="tiny", input="Hi", max_output_tokens=2, stream=True)
    assert raw.http_response.read().decode().startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')


def test_a_conversation_with_a_tool(chatml):
    given = {"tools": [TOOL], "instructions": "Be brief."}
    with scripted(chatml.engine, f"<think>Hm</think>{CALL}", "Rain.", f"<think>Hm</think>{CALL}", "No", "So") as prompts:
        first = create(chatml, **given, max_output_tokens=300)
        thought, call = first.output
        assert (thought.content[0].text, call.name, json.loads(call.arguments)) == ("Hm", "weather", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = create(chatml, [result], previous_response_id=first.id, **given)
        assert second.output_text == "Rain."
        events = list(create(chatml, **given, max_output_tokens=300, stream=True))
        whole = [{"role": "user", "content": "Hi"}, *first.output, result]
        create(chatml, whole, **given)
        create(chatml, whole, store=False, tool_choice="none", **given)
    assert prompts[1] == "<|end|><|tool|>rain(weather)<|end|><|assistant|>"
    names = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert names[4:7] == ["reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    assert names[-3:] == ["function_call_arguments.delta", "function_call_arguments.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert ("".join(deltas), len(deltas) > 3) == ('{"city": "Oslo"}', True)
    assert "<|assistant|><think>Hm</think><tool_call>weather</tool_call><|end|><|tool|>rain(weather)<|end|><|assistant|>" in prompts[3]
    assert prompts[3].startswith("<|system|>Tools")
    assert not prompts[4].startswith("<|system|>Tools")
    with pytest.raises(openai.BadRequestError, match="call_id must be of a call in the input or the previous response, got 'x'"):
        create(chatml, [{**result, "call_id": "x"}], previous_response_id=first.id, **given)


def test_helpers_of_openais_client(chatml):
    given = {"model": "tiny", "max_output_tokens": 300, "parallel_tool_calls": False}
    with scripted(chatml.engine, '{"city":"Rome"}', ends=False):
        found = chatml.client.responses.parse(**given, input="Where?", text_format=Weather)
    assert found.output_parsed == Weather(city="Rome")
    with scripted(chatml.engine, "<tool_call>", ends=False):
        tool = openai.pydantic_function_tool(Weather)
        found = chatml.client.responses.parse(**given, input="W", tools=[tool], tool_choice={"type": "function", "name": "Weather"})
    assert isinstance(found.output[0].parsed_arguments, Weather)


def test_responses_are_kept_and_removed(live):
    given = {"metadata": {"a": "b"}, "instructions": "Be brief."}
    found = create(live, **given)
    again = live.client.responses.retrieve(found.id)
    assert again == found
    assert (again.metadata, again.instructions, again.previous_response_id) == ({"a": "b"}, "Be brief.", None)
    items = live.client.responses.input_items.list(found.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Hi")]
    live.client.responses.delete(found.id)
    state = found.id.replace("resp_", "state-").replace("_", "-")
    assert httpx.get(f"{live.url}/v1/states/{state}").status_code == 404
    for call in live.client.responses.retrieve, live.client.responses.delete, live.client.responses.input_items.list:
        with pytest.raises(openai.NotFoundError) as caught:
            list(call(found.id))
        assert (caught.value.code, caught.value.type) == ("response_not_found", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as caught:
        create(live, previous_response_id=found.id, **given)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("name", ["", "resp_1_a", "../a", "resp_1_" + "0" * 32, "state-1-" + "0" * 32, "a" * 5000])
def test_names_are_no_paths(live, name):
    assert httpx.get(f"{live.url}/v1/responses/{name}").status_code in (404, 405)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        create(live, previous_response_id=name)


def test_what_is_not_stored_is_not_kept(live):
    listed = httpx.get(f"{live.url}/v1/states").json()
    found = create(live, store=False)
    assert httpx.get(f"{live.url}/v1/states").json() == listed
    with pytest.raises(openai.NotFoundError):
        live.client.responses.retrieve(found.id)


def test_a_state_without_notes_is_no_response(live):
    saved = live.client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"save_state": True}).choices[0].state
    with pytest.raises(openai.NotFoundError):
        live.client.responses.retrieve(saved.replace("state-", "resp_").replace("-", "_"))


def test_servers_share_a_folder_and_it_outlasts_them(model, tmp_path):
    with running(model, states_folder=tmp_path) as one, running(model, states_folder=tmp_path) as other:
        first = create(one)
        wanted = create(one, "And?", previous_response_id=first.id, store=False).output_text
        assert create(other, "And?", previous_response_id=first.id).output_text == wanted
        assert other.client.responses.retrieve(first.id) == first
    with running(model, states_folder=tmp_path) as again:
        assert create(again, "And?", previous_response_id=first.id).output_text == wanted


def test_least_recently_used_responses_are_dropped(model):
    with running(model, Limits(states=2)) as live:
        names = [create(live, max_output_tokens=2).id for _ in range(3)]
        create(live, previous_response_id=names[1], store=False, max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            live.client.responses.retrieve(names[0])


def test_instructions_and_tools_are_those_of_the_state(chatml):
    first = create(chatml, instructions="Be brief.", tools=[TOOL], max_output_tokens=2)
    for more in {"tools": [TOOL]}, {"tools": [TOOL], "instructions": "Be long."}, {"instructions": "Be brief."}:
        with pytest.raises(openai.BadRequestError, match="must be those of the previous response, got others or none"):
            create(chatml, previous_response_id=first.id, **more)
    assert create(chatml, previous_response_id=first.id, instructions="Be brief.", tools=[TOOL], max_output_tokens=2)


def test_tools_that_the_model_could_not_see_are_not_those_of_the_state(chatml):
    first = create(chatml, tools=[TOOL], tool_choice="none", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="tools must be those of the previous response, got some that its state does not have"):
        create(chatml, previous_response_id=first.id, tools=[TOOL])
    second = create(chatml, previous_response_id=first.id, tools=[TOOL], tool_choice="none", max_output_tokens=2)
    assert create(chatml, previous_response_id=second.id, max_output_tokens=2)


def test_templates_that_rewrite_earlier_messages_do_not_continue(model):
    with running(model, template=JinjaTemplate(COUNTS)) as live:
        first = create(live, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="writes what follows an answer by what was before it"):
            create(live, previous_response_id=first.id)
    with running(model, template=None) as live, pytest.raises(openai.BadRequestError, match="must have a chat template"):
        create(live)


WRONG = {
    "absent": ({"input": []}, "input"),
    "item": ({"input": [{"type": "item_reference", "id": "a"}]}, "type must be 'message', 'function_call', 'function_call_output'"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a text or a list of parts that are texts"),
    "role": ({"input": [{"content": "a"}]}, "role must be given with type message"),
    "mixed": ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "", "output": "c"}]}, "output must be absent"),
    "field": ({"extra_body": {"magic": 1}}, "magic must be absent"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function'"),
    "choice": ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none' without tools"),
    "background": ({"background": True}, "background must be false"),
    "truncation": ({"truncation": "auto"}, "truncation must be 'disabled'"),
    "metadata": ({"metadata": {"a": "b" * 513}}, "metadata must be an object of at most 16 texts"),
    "format": ({"text": {"format": {"type": "json_schema"}}}, "name and schema must be given with type json_schema"),
    "many": ({"input": [{"role": "user", "content": "a"}] * 1025}, "the number of messages must be at most 1024"),
    "parts": (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": ""}] * 1025}]},
        "the number of parts of messages must be at most 1024, got 1025",
    ),
    "summary": (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}] * 1025}]},
        "the number of parts of messages must be at most 1024, got 1025",
    ),
    "tokens": ({"max_output_tokens": 10**6}, "max_tokens must be at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_name(live, name):
    given, message = WRONG[name]
    with live.refuses(message):
        create(live, **given)


def test_an_error_in_a_stream_is_its_last_event(model):
    with running(model, Limits(seconds=0.3)) as live, scripted(live.engine, "a" * 4000):
        events = list(create(live, stream=True, max_output_tokens=4000))
    assert (events[-1].type, events[-1].response.status, events[-1].response.error.code) == ("response.failed", "failed", "timeout")


@pytest.mark.parametrize("field", [{"metadata": {"a": "\ud800"}}, {"instructions": "\ud800"}, {"user": "\ud800"},
                                   {"tool_choice": "none", "tools": [{**TOOL, "description": "\ud800"}]}])  # fmt: skip
def test_lone_surrogates_are_refused_or_not_read(live, field):
    content = json.dumps({"model": "tiny", "input": "a", "max_output_tokens": 2, **field})
    answer = httpx.post(f"{live.url}/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == (200 if "user" in field else 400), answer.text
