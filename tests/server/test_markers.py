"""Markers of reasoning and calls, as text, as tokens and as special tokens of a tokenizer's file."""

import json
from contextlib import closing

import anthropic
import pytest
import torch
from architectures import randomised
from live_server import KEY, running
from scripted_answers import scripted
from tokenizer_files import MARKERS, TOKENIZERS, add_markers, written
from tool_clients import ENDPOINTS, Answer, Call

from penstock.engine import Engine
from penstock.errors import RangeError
from penstock.models import CausalLM, gla
from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import text_after
from penstock.server.service import Service
from penstock.server.templates import JinjaTemplate, with_markers

pytest.importorskip("llguidance")

TEMPLATE = JinjaTemplate(
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for one in messages %}{{ one.content }},{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "parameters": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = Call("weather", {"city": "Oslo"})


def tokenizer_with_markers(name, folder):
    """Of a kind of ``TOKENIZERS``. Where it has a file, the markers are special tokens of it."""
    files = written(folder, ["the cat", CALL] * 9)
    for file in files.values():
        add_markers(file, special=True)
    return TOKENIZERS[name](files)


def model_for(tokenizer):
    torch.manual_seed(0)
    model = CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=16, num_layers=1, num_heads=1)).eval()
    return randomised(model) or model


@pytest.fixture(scope="module", params=TOKENIZERS)
def marked(request, tmp_path_factory):
    tokenizer = with_markers(tokenizer_with_markers(request.param, tmp_path_factory.mktemp("tokenizers")), TEMPLATE)
    with running(model_for(tokenizer), template=TEMPLATE, tokenizer=tokenizer) as live:
        yield live


@pytest.mark.parametrize("api", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_reasoning_and_calls_are_found(marked, api, stream):
    with scripted(marked.engine, f"<think>Hm. é</think>{CALL}", f"<think>Hm. é</think>So{CALL}", "So <b>", CALL):
        ask = ENDPOINTS[api].ask
        assert ask(marked, tools=[TOOL], stream=stream).answer == Answer("", "Hm. é", [OSLO], "calls")
        assert ask(marked, tools=[TOOL], stream=stream).answer == Answer("So", "Hm. é", [OSLO], "calls")
        assert ask(marked, tools=[TOOL], stream=stream).answer == Answer("So <b>", "", [], "stop")
        assert ask(marked, tools=[TOOL], parallel=False, stream=stream).answer == Answer("", "", [OSLO], "calls")


@pytest.mark.parametrize("given", [{"choice": "required"}, {"tools": [{**TOOL, "strict": True}]}], ids=["required", "strict"])
def test_grammars_let_models_write_them(marked, given):
    """The scripts are asserted to be within the grammars; the model, which is random, writes the rest."""
    ask = ENDPOINTS["chat"].ask
    with scripted(marked.engine, "<think>Hm</think><tool_call>", "<think>Hm</think>", ends=False):
        found = ask(marked, **{"tools": [TOOL], "parallel": False, **given}).answer
        assert (found.reasoning, [call.name for call in found.calls]) == ("Hm", ["weather"])
        found = ask(marked, schema=CITY).answer
    assert (found.reasoning, [*json.loads(found.content)]) == ("Hm", ["city"])


def test_a_budget_of_reasoning_beside_a_format(marked):
    encode = marked.engine.tokenizer.encode
    budget = len(encode("cat", after=encode("<think>")))
    extra = {
        "thinking": {"type": "enabled", "budget_tokens": budget}, "output_config": {"format": {"type": "json_schema", "schema": CITY}},
    }  # fmt: skip
    asked, client = [{"role": "user", "content": "Why?"}], anthropic.Anthropic(base_url=marked.url, api_key=KEY, max_retries=0)
    with scripted(marked.engine, "cat", ends=False), closing(client):
        found = client.messages.create(model="tiny", max_tokens=200, messages=asked, extra_body=extra)
    assert [one.type for one in found.content] == ["thinking", "text"]
    assert (found.content[0].thinking, [*json.loads(found.content[1].text)]) == ("cat", ["city"])


def test_completions_have_them(marked):
    with scripted(marked.engine, "the<think></think>"):
        found = marked.client.completions.create(model="tiny", prompt="a", max_tokens=30, logprobs=0).choices[0]
    assert found.text == "the<think></think>"
    assert "".join(found.logprobs.tokens[:-1]) == found.text


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("Bytes", "World")])
def test_special_tokens_become_text_in_a_tokenizer_of_its_own(name, tmp_path):
    plain = tokenizer_with_markers(name, tmp_path)
    shown, whole = plain.with_texts({*MARKERS, "<none>"}), "the<think> é</think><end>a"
    assert shown.with_texts(MARKERS) is shown
    assert plain.with_texts(["<none>", "the"]) is plain
    tokens = plain.encode(whole)
    assert shown.encode(whole) == tokens
    assert [marker for marker in MARKERS if marker in plain.decode(tokens)] == []
    assert shown.decode(tokens).replace("<think>", "").replace("</think>", "") == plain.decode(tokens)
    assert shown.decode(tokens).replace(" ", "") == "the<think>é</think>a"
    assert text_after(shown, tokens) == shown.decode(tokens)
    assert (shown.end_of_text, shown.ends, shown.vocab_size) == (plain.end_of_text, plain.ends, plain.vocab_size)
    ids = [shown.encode(marker)[-1] for marker in MARKERS]
    assert [plain.token_bytes[one] for one in ids] == [b""] * 4
    assert [shown.pieces[one] for one in ids] == [marker.encode() for marker in MARKERS]
    assert isinstance(shown, HuggingFace)


def test_a_service_refuses_a_tokenizer_that_hides_them(tmp_path):
    tokenizer = tokenizer_with_markers("metaspace", tmp_path)
    engine = Engine(model_for(tokenizer), tokenizer, slots=1)
    with pytest.raises(RangeError, match=r"Service: the tokenizer of engine must be one that decodes the markers .*with_markers\("):
        Service(engine, "tiny", TEMPLATE)
    Service(engine, "tiny", JinjaTemplate("{{ messages[0].content }}")).close_states()
    assert with_markers(tokenizer, None) is tokenizer
    engine.close()
