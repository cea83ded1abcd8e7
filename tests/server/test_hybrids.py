"""A hybrid with softmax attention over HTTP: limits of its length, states, metrics."""

import httpx
import pytest
import torch
from architectures import randomised
from live_server import VOCAB, running

from penstock.engine import Engine, SamplingParams
from penstock.layers import SoftmaxAttentionConfig
from penstock.models import CausalLM, gla, hybrid
from penstock.models.tokenizers import Bytes

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "intermediate_size": 32}
    model = CausalLM(hybrid(gla(**sizes, num_heads=2), SoftmaxAttentionConfig(2, max_length=256), [1])).eval()
    randomised(model)
    with running(model) as live:
        yield live
        live.settles()


def test_answers_without_a_limit_end_where_the_model_has_no_room(mixed):
    options = {"model": "tiny", "messages": MESSAGES, "logit_bias": {"32": 100}, "temperature": 0}
    answer = mixed.client.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 256
    response = mixed.client.responses.create(model="tiny", input="Hello")
    assert response.usage.total_tokens <= 256
    with mixed.refuses("max_tokens must be at most"):
        mixed.client.chat.completions.create(**options, max_tokens=256)
    with mixed.refuses("max_tokens must be at most 6 after 250 tokens, for max_length = 256, got 7"):
        mixed.client.completions.create(model="tiny", prompt="a" * 250, max_tokens=7)
    with mixed.refuses("prompt must be of at most max_length = 256 tokens, got 300 tokens"):
        mixed.client.completions.create(model="tiny", prompt="a" * 300, max_tokens=1)


def test_a_saved_state_has_its_pages(mixed):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    first = mixed.client.completions.create(prompt="a" * 100, extra_body={"save_state": True}, **options)
    name = first.choices[0].state
    alone, params = Engine(mixed.engine.model, Bytes(VOCAB), slots=1, token_budget=128), SamplingParams(max_tokens=20, temperature=0)
    tokens = alone.generate("a" * 100, params)[0].tokens
    found = mixed.client.completions.create(prompt="b", extra_body={"state": name}, **options)
    assert found.choices[0].text == alone.generate([*b"a" * 100, *tokens, *b"b"], params)[0].text
    assert b"mixer.keys" in httpx.get(f"{mixed.url}/v1/states/{name}").content


def test_metrics_count_pages(mixed):
    mixed.client.completions.create(model="tiny", prompt="c" * 130, max_tokens=1)
    lines = [line.split() for line in httpx.get(f"{mixed.url}/metrics").text.splitlines()]
    found = {line[0].removeprefix("penstock_"): float(line[1]) for line in lines if line[0] in ("penstock_pages", "penstock_free_pages")}
    assert found["pages"] == mixed.engine.stats.pages
    assert found["free_pages"] <= found["pages"] - 2
