"""Whether a model thinks, and for how many tokens: ``thinking`` of Anthropic's requests."""

from contextlib import closing

import anthropic
import pytest
from live_server import KEY, VOCAB, running
from scripted_answers import scripted
from tokenizer_files import TOKENIZERS, tokenizer_of

from penstock.models.tokenizers import Bytes
from penstock.server.answers import AnswerForm, read_answer
from penstock.server.families import REASONING
from penstock.server.templates import JinjaTemplate, WorldTemplate
from penstock.server.thinking import ThinkingBudget

SWITCHED = """{% for one in messages %}<|{{ one.role }}|>
{%- if one.reasoning_content is defined %}<think>{{ one.reasoning_content }}</think>{% endif %}{{ one.content }}
{%- for call in one.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{% endfor %}{{ tools or '' }}<|assistant|>{% if enable_thinking %}<think>
{% endif %}"""
ALWAYS = SWITCHED.replace("{% if enable_thinking %}", "{% if true %}")
ASK = [{"role": "user", "content": "Why?"}]
TOOL = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module", params=["enable_thinking", "thinking"])
def switched(model, request):
    with running(model, template=JinjaTemplate(SWITCHED.replace("enable_thinking", request.param))) as live:
        yield live


def send(live, messages=ASK, thinking=None, max_tokens=100, **more):
    with closing(anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0, timeout=60)) as client:
        extra = {"temperature": 0, "thinking": thinking}
        return client.messages.create(model="tiny", messages=messages, max_tokens=max_tokens, extra_body=extra, **more)


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled", None])
def test_a_variable_of_the_template_switches_it(switched, kind):
    thinking = {"type": kind} if kind else None
    with scripted(switched.engine, "So") as prompts:
        send(switched, thinking=thinking)
    assert prompts[0].endswith("<|assistant|><think>\n" if kind in ("enabled", "adaptive") else "<|assistant|>")
    with closing(anthropic.Anthropic(base_url=switched.url, api_key=KEY, max_retries=0)) as client:
        extra = {"thinking": thinking}
        assert client.messages.count_tokens(model="tiny", messages=ASK, extra_body=extra).input_tokens == len(prompts[0])


def test_a_template_without_a_variable_thinks_as_it_does(model):
    with running(model, template=JinjaTemplate(ALWAYS)) as live, scripted(live.engine, *["Hm</think>So"] * 3):
        for thinking in None, {"type": "enabled", "budget_tokens": 90}, {"type": "adaptive"}:
            assert [one.type for one in send(live, thinking=thinking).content] == ["thinking", "text"]
        with pytest.raises(anthropic.BadRequestError, match="thinking must be of type enabled or adaptive, because the model's chat"):
            send(live, thinking={"type": "disabled"})
    with running(model, template=WorldTemplate()) as live, scripted(live.engine, "So", "So"):
        for kind in "adaptive", "disabled":
            assert [one.type for one in send(live, thinking={"type": kind}).content] == ["text"]
        with pytest.raises(anthropic.BadRequestError, match=r"got enabled\. Serve with --reasoning-parser\."):
            send(live, thinking={"type": "enabled"})


@pytest.mark.parametrize("answer", [">Hm</think>So", ">\nHm\n</think>\n\nSo"])
def test_a_prompt_that_ends_within_the_marker(model, answer):
    """RWKV World's form: the answer begins with the end of the marker."""
    with running(model, template=WorldTemplate(reasoning=REASONING["think"])) as live, scripted(live.engine, answer, "So", "So") as prompts:
        content = send(live, thinking={"type": "enabled", "budget_tokens": 90}).content
        assert prompts[0].endswith("Assistant: <think")
        assert [(one.type, getattr(one, one.type)) for one in content] == [("thinking", "Hm"), ("text", "So")]
        for kind in "disabled", "enabled":  # this answer has no end of the marker
            assert [(one.type, getattr(one, one.type)) for one in send(live, thinking={"type": kind}).content] == [("text", "So")]


STOPPED = {
    "in the reasoning": ("a stop b</think>So", "So", None),
    "in both": ("a stop b</think>\n\nSo stop it", "So ", "stop"),
    "across the end": ("a st</think>op", "op", None),
    "not at all": ("a</think>So", "So", None),
    "in the marker": ("a</think>think", "t", "hin"),
    "no end of reasoning": ("a stop b", "", None),
}
"""Answers, their content, and what stops them."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("api", ["chat", "messages"])
@pytest.mark.parametrize("case", STOPPED)
def test_stop_texts_of_clients_count_after_the_reasoning(switched, api, case, begun, stream):
    text, content, stopped = STOPPED[case]
    (variable,) = {"enable_thinking", "thinking"} & {*switched.service.template.variables}
    with scripted(switched.engine, text if begun else f" <think>{text}"):
        if api == "chat":
            extra = {"chat_template_kwargs": {variable: begun}}
            given = {"model": "tiny", "messages": ASK, "stop": ["stop", "hin"], "max_tokens": 100, "extra_body": extra}
            found = switched.client.chat.completions.create(**given, stream=stream)
            pieces = [one.choices[0].delta if stream else one.choices[0].message for one in (found if stream else [found])]
            parts = ["".join(getattr(one, name, None) or "" for one in pieces) for name in ("reasoning_content", "content")]
        else:
            with closing(anthropic.Anthropic(base_url=switched.url, api_key=KEY, max_retries=0)) as client:
                extra = {"thinking": {"type": "enabled" if begun else "disabled"}}
                given = {"model": "tiny", "messages": ASK, "stop_sequences": ["stop", "hin"], "max_tokens": 100, "extra_body": extra}
                if stream:
                    with client.messages.stream(**given) as events:
                        found = events.get_final_message()
                else:
                    found = client.messages.create(**given)
            parts = ["".join(getattr(one, kind) for one in found.content if one.type == kind) for kind in ("thinking", "text")]
            assert (found.stop_reason, found.stop_sequence) == ("stop_sequence" if stopped else "end_turn", stopped)
    assert parts == [text.partition("</think>")[0], content]


@pytest.mark.parametrize("answer", ["<tag", "<thorough stop", " stop"])
def test_stop_texts_count_from_the_begin_of_an_answer_without_reasoning(switched, answer):
    with scripted(switched.engine, answer):
        found = send(switched, stop_sequences=["<t", "stop"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "stop" if answer == " stop" else "<t")
    assert [one.text for one in found.content if one.text] == ([" "] if answer == " stop" else [])


def test_what_ends_a_turn_of_the_template_ends_reasoning_too(model):
    template = WorldTemplate(reasoning=REASONING["think"])
    with running(model, template=template) as live, scripted(live.engine, ">Hm stop\n\nUser:", ends=False):
        found = send(live, thinking={"type": "enabled"}, stop_sequences=["stop"])
    assert [(one.type, one.thinking) for one in found.content] == [("thinking", "Hm stop")]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("stop", ["\n\nUser", "\n\n", "So\n\nUse"])
def test_a_stop_text_that_is_complete_before_the_end_of_the_turn_ends_the_answer(model, stop):
    """With which it begins, or which it overlaps."""
    template = WorldTemplate(reasoning=REASONING["think"])
    with running(model, template=template) as live, scripted(live.engine, f">Hm{stop}</think>So\n\nUser: a", ends=False):
        found = send(live, thinking={"type": "enabled"}, stop_sequences=[stop])
    assert [one.text for one in found.content if one.type == "text"] == ["So"] * (stop[0] == "\n")
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


THOUGHT = "Hm. Hm. Hm"


@pytest.mark.parametrize("budget", [len(THOUGHT), 50])
def test_a_budget_ends_reasoning(switched, budget):
    """The model is random: it would go on without the end."""
    with scripted(switched.engine, THOUGHT + "." * (budget - len(THOUGHT)), ends=False):
        answer = send(switched, thinking={"type": "enabled", "budget_tokens": budget}, max_tokens=budget + 30)
    assert [one.type for one in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == THOUGHT + "." * (budget - len(THOUGHT))


def test_a_budget_beside_required_calls(switched):
    with scripted(switched.engine, THOUGHT, ends=False):
        given = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        answer = send(switched, thinking={"type": "enabled", "budget_tokens": len(THOUGHT)}, **given)
    assert [one.type for one in answer.content] == ["thinking", "tool_use"]
    assert (answer.content[0].thinking, answer.content[1].name, answer.stop_reason) == (THOUGHT, "clock", "tool_use")


def test_reasoning_within_its_budget_is_not_changed(switched):
    texts = ["Hm.</think>Yes, and this text is longer.", "Hm.</think><think>Again, for more tokens than allowed.</think>"]
    for text in texts:
        with scripted(switched.engine, text):
            answer = send(switched, thinking={"type": "enabled", "budget_tokens": 12})
        assert [one.type for one in answer.content] == ["thinking", "text"]
        assert answer.content[1].text == text.partition("</think>")[2]


def test_earlier_reasoning_is_shown_by_the_template(switched):
    block = {"type": "thinking", "thinking": "Aha", "signature": "EqQBCg"}
    history = [*ASK, {"role": "assistant", "content": [block, {"type": "text", "text": "So."}]}, *ASK]
    with scripted(switched.engine, "So") as prompts:
        send(switched, history)
    assert "<|assistant|><think>Aha</think>So.<|user|>" in prompts[0].replace("\n", "")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_end_is_forced_token_by_token(name, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path)
    reasoning = REASONING["think"]
    free = b"\xff" * ((tokenizer.vocab_size + 7) // 8)
    for thinking, text in (True, "the cat the cat é"), (False, "<think>the cat the cat é"):
        form = AnswerForm(reasoning=reasoning, thinking=thinking)
        begun = tokenizer.encode(text)
        constraint = ThinkingBudget(tokenizer, tokenizer.vocab_size, form, len(begun), None)
        tokens = []
        for token in begun:
            assert constraint.mask == free
            assert not constraint.accept(token)
            tokens.append(token)
        while constraint.mask != free:
            (token,) = (token for token in range(tokenizer.vocab_size) if constraint.mask[token // 8] >> token % 8 & 1)
            assert not constraint.accept(token)
            tokens.append(token)
        answer = read_answer(form, tokenizer.decode([*tokens, *tokenizer.encode("the cat")]))
        assert (answer.reasoning, answer.content.strip()) == ("the cat the cat é", "the cat")
        for token in begun * 2:
            assert constraint.mask == free
            assert not constraint.accept(token)


def test_an_answer_without_reasoning_is_free():
    tokenizer = Bytes(VOCAB)
    constraint = ThinkingBudget(tokenizer, VOCAB, AnswerForm(reasoning=REASONING["think"]), 2, None)
    for token in b"No <think>thoughts":
        assert constraint.mask == b"\xff" * 33
        constraint.accept(token)
