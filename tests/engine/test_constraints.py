"""Constraints: masks of the logits that depend on the tokens so far."""

import pytest
from architectures import model_of

from penstock.engine import Engine, SamplingParams

VOCAB = 13


class Steps:
    """Token t may be followed by t + 1 and t + 2 (modulo the vocabulary) only; it ends after some tokens."""

    def __init__(self, first=(3,), most=20, fails_after=None):
        self.mask, self.left, self.fails_after = self.bits(first), most, fails_after

    @staticmethod
    def bits(tokens):
        return sum(1 << token for token in tokens).to_bytes(4, "little")

    def accept(self, token):
        if self.fails_after == 0:
            raise ZeroDivisionError("constraint")
        self.fails_after = None if self.fails_after is None else self.fails_after - 1
        self.mask, self.left = self.bits([(token + 1) % VOCAB, (token + 2) % VOCAB]), self.left - 1
        return self.left == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"repetition_penalty": 2.0, "presence_penalty": 1.0}, {"top_k": 1}], ids=str)
def test_tokens_follow_the_mask_whatever_runs_beside(overlap, more):
    engine = Engine(model_of("rwkv6"), slots=6, token_budget=256, overlap=overlap, cache_bytes=0)
    params = SamplingParams(max_tokens=50, n=3, seed=1, constraint=Steps, **more)
    plain = SamplingParams(max_tokens=40, seed=2)
    alone = engine.generate([[1, 2]], plain)[0].tokens
    results = engine.generate([[1, 2]] * 3, [params, plain, params])
    assert results[1].tokens == alone
    for result in (results[0], results[2]):
        for one in result.completions:
            assert (one.tokens[0], len(one.tokens), one.finish_reason) == (3, 20, "stop")
            assert {(later - earlier) % VOCAB for earlier, later in zip(one.tokens, one.tokens[1:])} <= {1, 2}
    if not more:
        assert len({tuple(one.tokens) for one in results[0].completions}) == 3


def test_a_constraint_that_raises_fails_its_request_alone():
    engine = Engine(model_of("rwkv6"), slots=6, token_budget=256)
    params = [SamplingParams(max_tokens=30, constraint=lambda: Steps(fails_after=5)), SamplingParams(max_tokens=30)]
    failed, other = engine.generate([[1], [1]], params)
    assert "ZeroDivisionError: constraint. Only this request failed" in str(failed.error)
    assert (other.error, len(other.tokens)) == (None, 30)
    engine.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_a_mask_of_a_wrong_type_fails_its_request_alone(overlap, after):
    class Masked(Steps):
        mask = property(lambda self: [3] if self.left == 20 - after else self.bits([3]), lambda self, value: None)

    engine = Engine(model_of("rwkv6"), slots=6, token_budget=256, overlap=overlap)
    (wanted,) = engine.generate([[1]], SamplingParams(max_tokens=30, seed=1))
    failed, other = engine.generate([[1], [1]], [SamplingParams(max_tokens=30, constraint=Masked), SamplingParams(max_tokens=30, seed=1)])
    assert "the mask of a constraint must be bytes, got [3] of type list. Only this request failed." in str(failed.error)
    assert other.tokens == wanted.tokens
    engine.check_integrity()
