"""``min_tokens``: nothing ends a completion before, whatever runs beside it."""

import math

import pytest
import torch
from architectures import model_of
from hypothesis import given
from hypothesis import strategies as st
from sampling import every

from penstock.engine import Engine, SamplingParams
from penstock.engine.text import TextStream
from penstock.errors import RangeError
from penstock.models import CausalLM, gla
from penstock.models.tokenizers import Bytes, ByteStream

VOCAB, ENDS, LEAST = 13, (0, 2, 3, 5, 7, 8, 11), 20
MORE = [
    {}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.6}, {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"logit_bias": {5: 3.0, 1: -1.0}},
]  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", every(2, MORE), ids=str)
def test_stop_tokens_come_after_the_minimum_and_change_nothing_else(overlap, more):
    engine = Engine(model_of("rwkv6"), slots=4, token_budget=256, overlap=overlap)
    prompt = [*range(VOCAB)] * 6
    params = SamplingParams(max_tokens=90, min_tokens=LEAST, stop_ids=ENDS, n=3, seed=1, **more)
    plain = SamplingParams(max_tokens=40, seed=2)
    biased = {**more, "logit_bias": {**more.get("logit_bias", {}), **dict.fromkeys(ENDS, -math.inf)}}
    (begin,) = engine.generate([prompt], SamplingParams(max_tokens=LEAST, n=3, seed=1, **biased))
    (alone,) = engine.generate([[1, 2]], plain)
    for result in engine.generate([prompt, [1, 2], prompt], [params, plain, params])[::2]:
        for one, wanted in zip(result.completions, begin.completions):
            assert one.tokens[:LEAST] == wanted.tokens
            assert one.finish_reason == "stop"
            assert one.tokens[-1] in ENDS
            assert not {*one.tokens[:-1]} & {*ENDS}
    assert engine.generate([prompt, [1, 2]], [params, plain])[1].tokens == alone.tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_of_text_comes_right_after_the_minimum(overlap):
    torch.manual_seed(0)
    model = CausalLM(gla(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)).eval()
    engine = Engine(model, Bytes(257), slots=4, token_budget=256, overlap=overlap)
    for least in (0, 1, 7):
        given = {"max_tokens": 30, "min_tokens": least, "logit_bias": {256: 100.0}}
        assert [len(one.tokens) for one in engine.generate(["a"], SamplingParams(**given, n=2))[0].completions] == [least + 1] * 2
        assert engine.generate(["a"], SamplingParams(**given, ignore_end=True))[0].tokens == [256] * 30
        (result,) = engine.generate(["a"], SamplingParams(**given, ignore_end=True, stop_ids=(256,)))
        assert len(result.tokens) == least + 1


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 12))
def test_stop_texts_that_are_complete_within_the_minimum_are_text(text, stop, least):
    stream, found = TextStream(ByteStream([bytes([n]) for n in range(128)]), tuple(stop), least=least), ""
    for token in text.encode():
        found += stream.push(token)
        if stream.stopped:
            break
    found += stream.finish()
    ends = [(end, -len(one)) for end in range(least + 1, len(text) + 1) for one in stop if text[:end].endswith(one)]
    if not ends:
        assert (found, stream.stopped) == (text, False)
    else:
        end, size = min(ends)
        assert (found, stream.stopped) == (text[: end + size], True)


class Digits:
    """An end is allowed at every place; after ``most`` tokens nothing else is, or the constraint ends."""

    def __init__(self, most, ends):
        self.left, self.ends = most, ends
        self.mask = self.bits((1, 2, 0))

    def bits(self, tokens):
        return sum(1 << token for token in tokens).to_bytes(2, "little")

    def accept(self, token):
        self.left -= 1
        self.mask = self.bits((1, 2, 0) if self.left else (0,))
        return self.left == 0 and self.ends


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_constraint_that_allows_nothing_else_ends_earlier(overlap, temperature):
    engine = Engine(model_of("gla"), slots=4, token_budget=256, overlap=overlap)

    def lengths(most, ends, least):
        params = SamplingParams(
            max_tokens=30, min_tokens=least, stop_ids=(0,), temperature=temperature, logit_bias={0: 100.0}, n=2,
            constraint=lambda: Digits(most, ends),
        )  # fmt: skip
        (result,) = engine.generate([[1]], params)
        assert result.error is None
        assert {one.finish_reason for one in result.completions} == {"stop"}
        assert all({*one.tokens[:-1]} <= {1, 2} for one in result.completions)
        return [len(one.tokens) for one in result.completions]

    assert lengths(20, False, 6) == [7, 7]
    assert lengths(4, False, 6) == [5, 5]
    assert lengths(4, True, 6) == [4, 4]


def test_stop_ids_of_all_tokens_end_at_once():
    (result,) = Engine(model_of("gla"), slots=4, token_budget=256).generate(
        [[1]], SamplingParams(min_tokens=3, stop_ids=tuple(range(VOCAB)))
    )
    assert (len(result.tokens), result.error) == (1, None)


def test_the_minimum_is_at_most_max_tokens():
    with pytest.raises(RangeError, match="SamplingParams: min_tokens must be at most max_tokens = 5, got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)
    with pytest.raises(RangeError, match="min_tokens must be a whole number of at least 0, got -1"):
        SamplingParams(min_tokens=-1)
