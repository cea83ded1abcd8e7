"""One way to ask the endpoints that answer messages, by their official clients: tests of tools and reasoning run over all of them.

A conversation is the question, then answers and results of their calls. ``Answer.raw`` is what the client sends back.
"""

import json
from contextlib import closing
from typing import Any, NamedTuple

import anthropic
import openai
from live_server import KEY

QUESTION = "Weather in Oslo?"


class Call(NamedTuple):
    name: str
    arguments: Any
    """An object, or the text of what is none."""


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]
    reason: str
    """stop, length or calls."""


class Given(NamedTuple):
    """An answer as it came."""

    answer: Answer
    raw: Any
    ids: list[str]
    """Of its calls."""


class Result(NamedTuple):
    """Of a call."""

    id: str
    text: str


def parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


class Chat:
    """``/v1/chat/completions``."""

    refused = openai.BadRequestError
    thinks = True
    cut = staticmethod(lambda text: text)
    """Arguments of a call that is cut."""
    stops = staticmethod(lambda text: ({"stop": text}, "stop"))
    """A stop text in a request, and the reason of an answer that it ends. None: requests have none."""
    stop_tokens = True
    """Whether requests may have ``stop_token_ids``."""

    def ask(self, live, *history, tools=(), choice="auto", parallel=True, schema=None, thinking=None, stream=False, **more):
        if choice not in ("auto", "required", "none"):
            choice = {"type": "function", "function": {"name": choice}}
        extra = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        given = {
            "model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": QUESTION}, *map(self._message, history)],
            "tools": [{"type": "function", "function": one} for one in tools], "tool_choice": choice, "parallel_tool_calls": parallel,
            "extra_body": extra, **({} if schema is None else {"response_format": form}), **more,
        }  # fmt: skip
        found = live.client.chat.completions.create(**given, stream=stream)
        return self._streamed(found) if stream else self._whole(found)

    def _message(self, one):
        return {"role": "tool", "tool_call_id": one.id, "content": one.text} if isinstance(one, Result) else one.raw

    def _whole(self, found):
        (choice,) = found.choices
        message = choice.message
        calls = message.tool_calls or []
        answer = Answer(
            message.content or "", getattr(message, "reasoning_content", None) or "",
            [Call(call.function.name, parsed(call.function.arguments)) for call in calls],
            "calls" if choice.finish_reason == "tool_calls" else choice.finish_reason,
        )  # fmt: skip
        return Given(answer, message, [call.id for call in calls])

    def _streamed(self, stream):
        content, reasoning, calls, ids, reason = "", "", [], [], None
        for piece in stream:
            for choice in piece.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    if call.id is not None:
                        assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                        calls.append([call.function.name, ""])
                        ids.append(call.id)
                    assert call.index == len(calls) - 1
                    calls[-1][1] += call.function.arguments
                reason = choice.finish_reason or reason
        calls = [Call(name, parsed(text)) for name, text in calls]
        return Given(Answer(content, reasoning, calls, "calls" if reason == "tool_calls" else reason), None, ids)


class Responses:
    """``/v1/responses``, with the whole conversation in each request."""

    refused = openai.BadRequestError
    thinks = False
    cut = staticmethod(lambda text: text)
    stops = None
    stop_tokens = False

    def ask(self, live, *history, tools=(), choice="auto", parallel=True, schema=None, stream=False, max_tokens=300, **more):
        items = [{"role": "user", "content": QUESTION}]
        for one in history:
            result = isinstance(one, Result)
            items += [{"type": "function_call_output", "call_id": one.id, "output": one.text}] if result else one.raw
        form = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
        given = {
            "model": "tiny", "max_output_tokens": max_tokens, "input": items, "store": False, "parallel_tool_calls": parallel,
            "tools": [{"type": "function", **one} for one in tools],
            "tool_choice": choice if choice in ("auto", "required", "none") else {"type": "function", "name": choice},
            **({} if schema is None else {"text": form}), **more,
        }  # fmt: skip
        found = live.client.responses.create(**given, stream=stream)
        if stream:
            *events, last = found
            deltas = "".join(one.delta for one in events if one.type.endswith(".delta"))
            found = last.response
            assert deltas == "".join(map(self._text, found.output))
        calls = [one for one in found.output if one.type == "function_call"]
        reasoning = "".join(self._text(one) for one in found.output if one.type == "reasoning")
        whole = [one.status == "completed" for one in calls]
        assert all(whole[:-1])
        reason = "length" if found.status == "incomplete" else "calls" if calls and all(whole) else "stop"
        answer = Answer(found.output_text, reasoning, [Call(one.name, parsed(one.arguments)) for one in calls], reason)
        return Given(answer, found.output, [one.call_id for one in calls])

    def _text(self, item):
        return item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)


class Messages:
    """``/v1/messages``."""

    refused = anthropic.BadRequestError
    thinks = True
    cut = staticmethod(lambda text: {})
    stops = staticmethod(lambda text: ({"stop_sequences": [text]}, "stop_sequence"))
    stop_tokens = False

    def ask(
        self, live, *history, tools=(), choice="auto", parallel=True, schema=None, thinking=None, stream=False, max_tokens=300, **extra
    ):
        kinds = {"auto": {"type": "auto"}, "required": {"type": "any"}, "none": {"type": "none"}}
        choice = kinds.get(choice, {"type": "tool", "name": choice})
        if schema is not None:
            extra["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if thinking is not None:
            extra["thinking"] = {"type": "adaptive" if thinking else "disabled"}
        given = {
            "model": "tiny", "max_tokens": max_tokens, "messages": [{"role": "user", "content": QUESTION}, *map(self._message, history)],
            "tools": [self._tool(one) for one in tools], "tool_choice": {**choice, "disable_parallel_tool_use": not parallel},
            "extra_body": extra,
        }  # fmt: skip
        with closing(anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0, timeout=60)) as client:
            return self._answer(self._streamed(client, given) if stream else client.messages.create(**given))

    def _tool(self, one):
        schema = one.get("parameters", {"type": "object", "properties": {}, "additionalProperties": False})
        same = {name: one[name] for name in ("name", "description", "strict") if name in one}
        return {**same, "input_schema": schema}

    def _message(self, one):
        if isinstance(one, Result):
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one.id, "content": one.text}]}
        return {"role": "assistant", "content": one.raw}

    def _streamed(self, client, given):
        """The message that the client makes of a stream, in which each block begins and ends before the next one."""
        with client.messages.stream(**given) as stream:
            events, found = list(stream), stream.get_final_message()
        order = [(one.type, one.index) for one in events if one.type.startswith("content_block")]
        expected = []
        for index in range(len(found.content)):
            deltas = order.count(("content_block_delta", index))
            expected += [("content_block_start", index), *[("content_block_delta", index)] * deltas, ("content_block_stop", index)]
        assert order == expected
        assert [events[0].type, events[-2].type, events[-1].type] == ["message_start", "message_delta", "message_stop"]
        begins = [one.content_block for one in events if one.type == "content_block_start"]
        assert all(one.input == {} for one in begins if one.type == "tool_use")
        return found

    def _answer(self, found):
        texts = {"text": "", "thinking": ""}
        for one in found.content:
            if one.type in texts:
                texts[one.type] += getattr(one, one.type)
        calls = [one for one in found.content if one.type == "tool_use"]
        reason = {"tool_use": "calls", "end_turn": "stop", "max_tokens": "length"}.get(found.stop_reason, found.stop_reason)
        answer = Answer(texts["text"], texts["thinking"], [Call(one.name, one.input) for one in calls], reason)
        return Given(answer, found.content, [one.id for one in calls])


ENDPOINTS = {"chat": Chat(), "responses": Responses(), "messages": Messages()}
