"""The sampler against a literal evaluation of one row in Python's whole numbers and floats."""

import math
import random

import pytest
import torch

from penstock.engine import SamplingParams
from penstock.engine.sampler import Row, sample, seed_of, uniform
from penstock.errors import DtypeError, RangeError

V = 50


def literal(logits: list[float], row: Row) -> int:
    """One row, step by step."""
    p = row.params
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    if p.repetition_penalty != 1:
        for token in {*row.prompt, *row.counts}:
            logits[token] = logits[token] / p.repetition_penalty if logits[token] > 0 else logits[token] * p.repetition_penalty
    for token, count in row.counts.items():
        logits[token] -= p.presence_penalty + p.frequency_penalty * count
    if p.temperature == 0 or p.top_k == 1:
        return max(range(V), key=lambda token: (logits[token], -token))
    most = max(logits)
    weights = [int(math.exp((x - most) / p.temperature) * 2**44) for x in logits]
    kept = sorted(range(V), key=lambda token: (-weights[token], token))
    kept = [token for token in kept if weights[token] >= p.min_p * 2**44]
    kept = kept[: p.top_k or V]
    total, nucleus, so_far = sum(weights[token] for token in kept), set(), 0
    for token in kept:
        if so_far >= p.top_p * total:
            break
        nucleus.add(token)
        so_far += weights[token]
    drawn, so_far = int(uniform(row.seed, row.position) * sum(weights[token] for token in nucleus)), 0
    for token in sorted(nucleus):
        so_far += weights[token]
        if drawn < so_far:
            return token
    raise AssertionError


def drawn_row(rng: random.Random) -> Row:
    maybe = rng.random
    params = SamplingParams(
        temperature=rng.choice([0, 0.1, 0.7, 1.0, 3]), top_k=rng.choice([0, 0, 1, 3, 20, 500]), top_p=rng.choice([1, 1, 0.9, 0.3, 1e-9]),
        min_p=rng.choice([0, 0, 0.1, 0.5, 1]), presence_penalty=rng.choice([0, 0.5, -1]), frequency_penalty=rng.choice([0, 0.3]),
        repetition_penalty=rng.choice([1, 1.2, 0.8]),
        logit_bias={} if maybe() < 0.5 else {rng.randrange(V): rng.uniform(-5, 5) for _ in range(4)},
    )  # fmt: skip
    counts = {rng.randrange(V): rng.randrange(1, 4) for _ in range(5)}
    return Row(params, rng.getrandbits(64), rng.randrange(10**6), counts, [rng.randrange(V) for _ in range(6)])


def test_batches_equal_the_literal_evaluation():
    rng = random.Random(0)
    logits = torch.randn(300, V, generator=torch.Generator().manual_seed(0)) * 3
    rows = [drawn_row(rng) for _ in range(len(logits))]
    found = sample(logits, rows).tolist()
    assert found == [literal(x.tolist(), row) for x, row in zip(logits.double(), rows)]
    assert found == [int(sample(logits[n : n + 1], [row])) for n, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_stay_as_they_are(dtype):
    """Log probabilities are made of them after the tokens."""
    rng = random.Random(1)
    logits = torch.randn(60, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = logits.clone()
    sample(logits, [drawn_row(rng) for _ in range(len(logits))])
    assert torch.equal(logits, given)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0}], ids=str)
def test_frequencies_are_the_probabilities(options):
    logits, params, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 2.5]), SamplingParams(**options), 20000
    rows = [Row(params, 7, position, {}) for position in range(count)]
    found = torch.bincount(sample(logits.expand(count, -1), rows), minlength=8) / count
    p = torch.softmax(logits / params.temperature, 0)
    ranked, order = p.sort(descending=True)
    ranked[ranked < params.min_p * ranked[0]] = 0
    ranked[params.top_k or 8 :] = 0
    ranked[ranked.cumsum(0) - ranked >= params.top_p * ranked.sum()] = 0
    wanted = torch.zeros(8).scatter(0, order, ranked / ranked.sum())
    assert torch.equal(found > 0, wanted > 0)
    assert (found - wanted).abs().max() < 4 * (0.25 / count) ** 0.5


def test_uniform_numbers():
    drawn = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= x < 1 for x in drawn)
    for power, wanted in ((1, 1 / 2), (2, 1 / 3), (3, 1 / 4)):
        assert abs(sum(x**power for x in drawn) / len(drawn) - wanted) < 0.02
    assert len({seed_of(3, index) for index in range(100)}) == 100


def test_excluded_tokens_and_extreme_logits():
    logits = torch.tensor([[math.inf, 0.0, 0.0, 5.0], [-math.inf, 1e30, -1e30, 0.0]])
    assert sample(logits[1:], [Row(SamplingParams(), 1, 1, {})]).tolist() == [1]
    biased = SamplingParams(logit_bias={0: -math.inf, 3: -math.inf})
    found = sample(torch.zeros(500, 4), [Row(biased, 1, n, {}) for n in range(500)])
    assert set(found.tolist()) == {1, 2}
    assert sample(torch.full((1, 4), math.nan), [Row(SamplingParams(), 1, 1, {})]).item() in range(4)


def test_tokens_beyond_the_vocabulary_of_the_tokenizer_are_never_sampled():
    logits = torch.zeros(200, 8)
    logits[:, 6] = 100
    found = sample(logits, [Row(SamplingParams(temperature=n % 2), 1, n, {}) for n in range(200)], vocab_size=5)
    assert int(found.max()) < 5


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": math.inf}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2}, {"n": 0},
     {"max_tokens": -1}, {"logprobs": 21}, {"repetition_penalty": 0}, {"seed": 2**64}, {"presence_penalty": math.nan},
     {"temperature": 10**400}, {"presence_penalty": -(10**400)}, {"frequency_penalty": 10**400}, {"repetition_penalty": 10**400}],
    ids=str,
)  # fmt: skip
def test_values_outside_of_their_range_are_refused(options):
    (name,) = options
    with pytest.raises(RangeError, match=f"SamplingParams: {name} must be"):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [{"temperature": "1"}, {"n": 1.5}, {"stop": ("",)}, {"stop": 3}, {"stop_ids": ("a",)}, {"logit_bias": {1: math.nan}},
     {"logit_bias": {True: 1.0}}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 10**400}}, {"logit_bias": {1: -(10**400)}},
     {"logit_bias": {1: True}}, {"logit_bias": [1]}, {"n": True}, {"echo": 1}, {"keep_state": "no"}, {"ignore_end": None},
     {"include_stop": 0}, {"constraint": 3}],
    ids=str,
)  # fmt: skip
def test_values_of_wrong_types_are_refused(options):
    (name,) = options
    with pytest.raises(DtypeError, match=f"SamplingParams: {name} must be"):
        SamplingParams(**options)
