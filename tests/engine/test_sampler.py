"""The sampler against a literal evaluation of one row in Python's whole numbers and numpy's float32."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine import Engine, SamplingParams, choosing, sampler, slot_tables
from penstock.engine.choosing import NO_TOKEN
from penstock.engine.graphs import with_sampled
from penstock.engine.sampler import Sampler
from penstock.engine.scoring import logprobs_of
from penstock.engine.slot_tables import Row
from penstock.engine.uniforms import ROUNDS, STEP, key_of, mixed, seed_of, uniform, uniforms
from penstock.errors import DtypeError, RangeError
from penstock.models import CausalLM, gla, probabilities
from penstock.models.probabilities import MOST_TOKENS

V = 50


def sample(logits, rows, positions, vocab_size=None):
    """The tokens of rows that get a slot each."""
    made = Sampler(len(rows), min(vocab_size or logits.shape[1], logits.shape[1]), logits.device)
    return made.sample(logits, rows, range(len(rows)), positions)


f32 = np.float32


def literal_weight(d: np.float32, temperature: float) -> np.float32:
    """exp(d / temperature) for d <= 0, operation by operation."""
    c = temperature * math.log(2)
    high = f32((np.array(f32(c)).view(np.int32) & -256).view(f32))
    scale, low = f32(1 / temperature * (1 / math.log(2))), f32(c - float(high))
    d = max(d, f32(-50 * c))
    n = f32(f32(d * scale) + f32(12582912)) - f32(12582912)
    f = f32(f32(f32(d - f32(n * high)) - f32(n * low)) * scale)
    p = f32(probabilities.POLYNOMIAL[5])
    for factor in (*probabilities.POLYNOMIAL[4::-1], 1.0):
        p = f32(f32(p * f) + f32(factor))
    return f32(np.ldexp(p, int(n)))


def literal(logits: list[float], row: Row, position: int) -> int:
    """One row, step by step."""
    p, V, counts = row.params, len(logits), Counter(row.tokens[row.prompt :])
    x = [f32(one) for one in logits]
    for token, bias in p.logit_bias.items():
        x[token] = f32(x[token] + f32(bias))
    if p.repetition_penalty != 1:
        for token in set(row.tokens):
            x[token] = f32(x[token] / f32(p.repetition_penalty) if x[token] > 0 else x[token] * f32(p.repetition_penalty))
    for token, count in counts.items():
        x[token] = f32(x[token] - f32(f32(p.presence_penalty) + f32(f32(count) * f32(p.frequency_penalty))))
    if p.temperature == 0 or p.top_k == 1:
        return max(range(V), key=lambda token: (x[token], -token))
    most = max(x)
    found = [literal_weight(f32(one - most), p.temperature) for one in x]
    found = [one if one >= max(p.min_p, 2.0**-44) else f32(0) for one in found]
    whole = [int(float(one) * 2**44) for one in found]
    ranked = sorted(range(V), key=lambda token: (-found[token], token))
    total, kept, so_far = sum(whole[token] for token in ranked[: p.top_k or V]), [], 0
    for token in ranked[: p.top_k or V]:
        if p.top_p < 1 and so_far >= p.top_p * float(total):
            break
        kept.append(token)
        so_far += whole[token]
    candidates, draws = [token for token in ranked if found[token] >= found[ranked[(p.top_k or V) - 1 if p.top_k < V else -1]]], 0
    while True:
        drawn = int(uniform(row.seed, position + draws * 2**40) * float(sum(whole[token] for token in candidates)))
        so_far = 0
        for token in sorted(candidates, key=lambda token: (token % probabilities.LANES, token)):
            so_far += whole[token]
            if drawn < so_far:
                break
        if token in kept:
            return token
        candidates, draws = candidates[: candidates.index(token)], draws + 1


@pytest.mark.parametrize("temperature", [1e-40, 1e-5, 0.3, 1.0, 7.0, 1e30, 1e300])
def test_weights_are_exponentials(temperature):
    """Within the rounding of the difference of two logits and 1 ulp of the result; those of the literal evaluation."""
    x = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0)) * 8
    x[1] = x[1].bfloat16()
    x[2, :3] = torch.tensor([-math.inf, -3e38 if temperature <= probabilities.HOTTEST else 0.0, 40.0])
    used = min(max(temperature, probabilities.COLDEST), probabilities.HOTTEST)
    largest = x.amax(-1, keepdim=True)
    found = probabilities.weights(x, largest, torch.full((3, 1), used, dtype=torch.float64))
    exact = torch.exp((x.double() - largest) / temperature)
    error = (found - exact).abs() / exact.clamp(min=2.0**-44)
    distance = ((largest - x).double() / temperature).clamp(max=32)
    assert (error <= 2**-23 + distance * 2**-24 * torch.tensor([1.0, 0, 1])[:, None] + 2.0**-44 / exact.clamp(min=2.0**-44)).all()
    assert (found.amax(-1) == 1).all()
    if temperature in (used, 1e-5):
        for row, most, wanted in zip(found, largest, x):
            for n in range(0, 4000, 37):
                one = literal_weight(f32(float(wanted[n])) - f32(float(most)), used)
                assert float(row[n]) == (one if one >= 2**-44 else 0)


def drawn_row(rng: random.Random) -> Row:
    maybe = rng.random
    params = SamplingParams(
        temperature=rng.choice([0, 0.1, 0.7, 1.0, 3]), top_k=rng.choice([0, 0, 1, 3, 20, 500]), top_p=rng.choice([1, 1, 0.9, 0.3, 1e-9]),
        min_p=rng.choice([0, 0, 0.1, 0.5, 1]), presence_penalty=rng.choice([0, 0.5, -1]), frequency_penalty=rng.choice([0, 0.3]),
        repetition_penalty=rng.choice([1, 1.2, 0.8]),
        logit_bias={} if maybe() < 0.5 else {rng.randrange(V): rng.uniform(-5, 5) for _ in range(rng.choice([1, 4, 9]))},
    )  # fmt: skip
    return Row(params, rng.getrandbits(64), [rng.randrange(V) for _ in range(rng.randrange(6, 17))], 6)


def test_batches_equal_the_literal_evaluation():
    rng = random.Random(0)
    logits = torch.randn(300, V, generator=torch.Generator().manual_seed(0)) * 3
    rows, positions = [drawn_row(rng) for _ in range(len(logits))], [rng.randrange(10**6) for _ in range(len(logits))]
    found = sample(logits, rows, positions).tolist()
    assert found == [literal(x.tolist(), row, position) for x, row, position in zip(logits.double(), rows, positions)]
    assert found == [int(sample(logits[n : n + 1], [row], positions[n : n + 1])) for n, row in enumerate(rows)]


def test_rows_that_come_go_and_move_equal_the_literal_evaluation():
    """Tables keep the values of rows from step to step; a slot may get another row, and a row another slot."""
    rng, logits_of, slots = random.Random(2), torch.Generator().manual_seed(1), 12
    made, rows = Sampler(slots, V, torch.device("cpu")), {}
    for _ in range(60):
        for slot in range(slots):
            if slot not in rows or rng.random() < 0.1:
                rows[slot] = drawn_row(rng)
            elif rng.random() < 0.1:
                other = rng.choice(list(rows))
                rows[slot], rows[other] = rows[other], rows[slot]
        chosen = rng.sample(range(slots), rng.randrange(1, slots + 1))
        logits = torch.randn(len(chosen), V, generator=logits_of) * 3
        positions = [len(rows[slot].tokens) for slot in chosen]
        wanted = [literal(x.tolist(), rows[slot], position) for x, slot, position in zip(logits.double(), chosen, positions)]
        assert made.sample(logits, [rows[slot] for slot in chosen], chosen, positions).tolist() == wanted
        assert made.last[torch.tensor(chosen)].tolist() == wanted
        for slot, token in zip(chosen, wanted):
            rows[slot].tokens.append(token)


def test_a_row_that_returns_to_an_earlier_slot_has_the_counts_of_all_its_tokens():
    """Nothing else used the slot meanwhile, as after a preemption by a request that was cancelled before its first token."""
    made, row = Sampler(2, V, torch.device("cpu")), Row(SamplingParams(temperature=0, presence_penalty=5.0), 1, [1], 1)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    for slot in (0, 1, 1, 0, 0, 1):
        row.tokens.append(int(made.sample(logits, [row], [slot], [len(row.tokens)])))
    assert row.tokens[1:] == logits[0].topk(6)[1].tolist()


@pytest.mark.parametrize("size", [1, 7, 300, 60000])
def test_most_likely_tokens_do_not_depend_on_how_many_other_rows_want(size):
    """Many log probabilities are equal: the lower tokens come first."""
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, ::5] = -math.inf
    logits[:, 0] = 0
    tokens = torch.zeros(4, dtype=torch.int64)
    scores = torch.log_softmax(logits.double(), -1)
    wanted = scores.sort(dim=-1, descending=True, stable=True)[1]
    for most in (0, 1, 2, 20):
        count, found = min(most, size), logprobs_of(logits, tokens, most)
        assert torch.equal(found[:, 1 + count :].long(), wanted[:, :count])
        torch.testing.assert_close(found[:, 1 : 1 + count], scores.gather(1, wanted[:, :count]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 8.0])
def test_a_large_vocabulary_is_ranked_by_candidates_where_they_suffice(scale, monkeypatch):
    """With flat logits the nucleus has more tokens than there are candidates. Many weights are equal."""
    rng, size = random.Random(3), 3000
    monkeypatch.setattr(probabilities, "LANES", 256)
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=min_p, temperature=0.5)
        for k in (0, 1, 7, 300, 2999) for p in (1, 0.99999, 0.7, 1e-9) for min_p in (0, 0.001)
    ]  # fmt: skip
    logits = (torch.randn(len(params), size, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
    rows, positions = [Row(one, rng.getrandbits(64)) for one in params], list(range(len(params)))
    found = sample(logits, rows, positions).tolist()
    assert found == [literal(x.tolist(), row, position) for x, row, position in zip(logits.double(), rows, positions)]
    for candidates in (1, 300, size):
        monkeypatch.setattr(probabilities, "CANDIDATES", candidates)
        assert sample(logits, rows, positions).tolist() == found


class Masked:
    """Allows some tokens."""

    def __init__(self, allowed, V):
        self.mask = sum(1 << token for token in allowed if token < V).to_bytes(-(-V // 8), "little")


@pytest.mark.parametrize("tokens", [0, 1, 128, 131])
def test_the_kernel_of_known_tokens(tokens):
    """Under the interpreter. A token that was not chosen counts as 0."""
    kernel = pytest.importorskip("penstock.engine.known_kernel")
    random = torch.Generator().manual_seed(0)
    last = torch.tensor([5, -1, 2**40, 7])
    ids, sources = torch.randint(2**40, (tokens,), generator=random), torch.randint(-1, 4, (tokens,), generator=random)
    assert torch.equal(kernel.known_tokens(ids, sources, last), with_sampled(ids, sources, last))


@pytest.mark.parametrize("size", [1, 64, 65, 300])
@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [("greedy", torch.float32), ("drawn", torch.float16), ("limited", torch.float32), ("changed", torch.float64), ("all", torch.float16),
     ("all", torch.float64)],
    ids=str,
)  # fmt: skip
def test_the_kernel_chooses_the_same_tokens(dtype, kinds, size, monkeypatch):
    """Under the interpreter, in two steps each: -inf, NaN, ties, strides, sizes around a pass, ends of random numbers."""
    kernel = pytest.importorskip("penstock.engine.choosing_kernel")
    generator, rng = torch.Generator().manual_seed(0), random.Random(4)
    monkeypatch.setattr(probabilities, "LANES", 64)
    plain = kernel.choose_by_kernel
    monkeypatch.setattr(kernel, "choose_by_kernel", lambda *given: plain(*given, lanes=64, searched=128))
    logits = torch.randn(15, size, dtype=torch.float64, generator=generator).mul_(3).to(dtype)
    logits[0], logits[6] = logits[0].round(), 0
    logits[1, : size // 2], logits[2, size // 2], logits[3], logits[4, 0] = -math.inf, math.nan, -math.inf, math.inf
    logits[5, 1:] = -math.inf
    rows = []
    for n in range(15):
        options = {"temperature": [0, 1e-9, 0.7, 1, 50][n % 5] if kinds in ("drawn", "all") else 0.8}
        options["min_p"] = rng.choice([0, 0.01, 1])
        if kinds == "greedy":
            options["temperature"] = 0
        if kinds in ("limited", "all"):
            options |= {"top_k": rng.choice([0, 1, 2, 7, size]), "top_p": rng.choice([1, 1e-9, 0.3, 0.9, 0.99999])}
        constraint = None
        if kinds in ("changed", "all"):
            options |= {"presence_penalty": rng.choice([0, 0.7, -1]), "frequency_penalty": rng.choice([0, 0.3])}
            options |= {"repetition_penalty": rng.choice([1, 1.3, 0.7])}
            options |= {"logit_bias": {rng.randrange(size): rng.choice([-100.0, -2.5, 4]) for _ in range(rng.randrange(6))}}
            if rng.random() < 0.5:
                constraint = Masked({rng.randrange(size) for _ in range(5)}, size)
        tokens = [rng.randrange(size) for _ in range(8)]
        rows.append(Row(SamplingParams(**options), rng.getrandbits(64), tokens, 4, constraint))
    slots = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)].tolist()
    by_kernel, in_torch = (Sampler(len(rows) + 2, size, logits.device) for _ in range(2))
    by_kernel._kernels = True
    copies = [Row(row.params, row.seed, row.tokens, row.prompt, row.constraint) for row in rows]
    for step in range(2):
        x = (torch.cat([logits, logits], 1)[:, :size], logits.T.contiguous().T)[step]
        wanted = in_torch.sample(x, rows, slots, [step] * len(rows))
        assert torch.equal(by_kernel.sample(x, copies, slots, [step] * len(rows)), wanted)
        assert wanted[3] == NO_TOKEN
        assert kinds in ("changed", "all") or wanted[2] == NO_TOKEN  # a mask may exclude NaN
        assert torch.equal(by_kernel.last, in_torch.last)
    if by_kernel.tables.seen is not None:
        assert torch.equal(by_kernel.tables.seen[slots], in_torch.tables.seen[slots])
    for bits in (0, 2**64 - 1) if size == 65 else ():
        for made in (by_kernel, in_torch):
            made.tables.numbers[:, slot_tables.KEY].view(torch.int64).fill_(
                torch.tensor(unmixed(bits), dtype=torch.uint64).view(torch.int64)
            )
        wanted = in_torch.sample(logits, rows, slots, [0] * len(rows))
        assert torch.equal(by_kernel.sample(logits, copies, slots, [0] * len(rows)), wanted)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_kernel_of_log_probabilities_equals_the_formula(dtype, size):
    """Under the interpreter: ties, -0, -inf, NaN, strides, more tokens wanted than there are."""
    kernel = pytest.importorskip("penstock.engine.scoring_kernel")
    logits = torch.randn(8, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).mul_(3).to(dtype)
    logits[0], logits[1, size // 2], logits[2] = logits[0].round(), math.nan, -math.inf
    logits[3, 0], logits[4, ::2] = math.inf, -math.inf
    logits[5], logits[5, ::3] = -0.0, 0.0
    tokens = torch.arange(8) % size
    for most in (0, 1, 3, 20):
        for x in (logits, logits.T.contiguous().T):
            wanted, found = logprobs_of(x, tokens, most), kernel.logprobs_by_kernel(x, tokens, min(most, size), 64)
            fine = [0, 4, 5, 6, 7] if size > 1 else [0, 5, 6, 7]
            torch.testing.assert_close(found[fine], wanted[fine], rtol=0, atol=1e-6)
            assert torch.equal(found[fine, 1 + min(most, size) :], wanted[fine, 1 + min(most, size) :])
            assert found[1:4, 0].isnan().all()
            assert wanted[1:4, 0].isnan().all()


def unmixed(value: int) -> int:
    """The number whose hash this is."""
    back = lambda x, shift: x ^ (x >> shift) ^ (x >> 2 * shift)  # noqa: E731
    value = back(value, 31)
    for shift, factor in reversed(ROUNDS):
        value = back(value * pow(factor, -1, 2**64) % 2**64, shift)
    return value


def test_random_numbers_of_tensors_are_those_of_whole_numbers():
    """Also where sums and products leave 64 bits."""
    rng = random.Random(0)
    seeds = [0, 1, 2**64 - 1, 2**63, *(rng.getrandbits(64) for _ in range(200))]
    positions = [0, 1, 2**31, 2**40, *(rng.randrange(10**6) for _ in range(200))]
    keys = torch.tensor([key_of(seed) for seed in seeds], dtype=torch.uint64).view(torch.int64)
    found = uniforms(keys, torch.tensor(positions))
    assert found.tolist() == [uniform(*pair) for pair in zip(seeds, positions)]
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(float(found.mean()) - 0.5) < 0.1
    assert uniform(3, 5) == (mixed((mixed(3 + STEP) + 5 * STEP) % 2**64) >> 11) / 2**53
    assert all(mixed(unmixed(seed)) == seed for seed in seeds)


class Calls(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_step_copies_once_whatever_its_rows_need(by_kernel, monkeypatch):
    """A step by the kernel also calls torch as often for many rows as for few, and launches once."""
    params = [
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(min_p=0.1),
        SamplingParams(presence_penalty=1.0), SamplingParams(repetition_penalty=1.1), SamplingParams(logit_bias={1: 1.0, 2: 2.0}),
    ]  # fmt: skip
    copies, launches, module = [], [], sampler if by_kernel else choosing
    plain = module.from_buffer
    monkeypatch.setattr(module, "from_buffer", lambda *given: copies.append(1) or plain(*given))
    if by_kernel:
        kernel = pytest.importorskip("penstock.engine.choosing_kernel")
        launch = lambda *given, **constants: launches.append(constants)  # noqa: E731
        monkeypatch.setattr(kernel, "on_device_of", lambda *given: {(8,): launch, (64,): launch})
    counts = []
    for count in (8, 64):
        made, rows = Sampler(count, V, torch.device("cpu")), [Row(params[n % 8], n, [1, 2], 1) for n in range(count)]
        made._kernels = by_kernel
        made.sample(torch.randn(count, V), rows, range(count), [2] * count)
        copies.clear()
        launches.clear()
        with Calls() as calls:
            made.sample(torch.randn(count, V), rows[::-1], range(count)[::-1], [3] * count)
        counts.append(calls.count)
        assert len(copies) == 1
        assert len(launches) == by_kernel
    assert counts[0] == counts[1] or not by_kernel


def test_sums_of_the_largest_vocabulary_do_not_overflow():
    """All logits are equal, so all weights are 2**44."""
    logits = torch.zeros(2, MOST_TOKENS)
    rows = [Row(SamplingParams(), 1), Row(SamplingParams(top_p=0.5), 1)]
    wanted = []
    for kept in (MOST_TOKENS, MOST_TOKENS // 2 + 1):
        token, draws = MOST_TOKENS, 0
        while draws == 0 or token >= kept:  # all weights are equal, so the rank of a token is its number
            candidates = sorted(range(token), key=lambda one: (one % probabilities.LANES, one))
            token, draws = candidates[int(uniform(1, 1 + draws * 2**40) * token)], draws + 1
        wanted.append(token)
    assert sample(logits, rows, [1, 1]).tolist() == wanted
    assert float(logprobs_of(logits, torch.zeros(2, dtype=torch.int64), 0)[0]) == pytest.approx(-math.log(MOST_TOKENS))
    model = CausalLM(gla(vocab_size=MOST_TOKENS + 1, hidden_size=8, num_layers=1, num_heads=1))
    with pytest.raises(RangeError, match="Engine: model must be of at most 524287 tokens, got a vocabulary of 524288"):
        Engine(model)


def test_keys_of_the_largest_vocabulary_do_not_overflow():
    """The weight and the token have 64 bits together."""
    size = MOST_TOKENS
    logits = torch.full((2, size), -30.0)
    logits[:, [3, size - 1]] = 0.0
    rows = [Row(SamplingParams(top_k=2), 1), Row(SamplingParams(top_p=0.9), 1)]
    for position in range(20):
        assert set(sample(logits, rows, [position] * 2).tolist()) <= {3, size - 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_stay_as_they_are(dtype):
    """Log probabilities are made of them after the tokens."""
    rng = random.Random(1)
    logits = torch.randn(60, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = logits.clone()
    sample(logits, [drawn_row(rng) for _ in range(len(logits))], range(len(logits)))
    assert torch.equal(logits, given)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0}], ids=str)
def test_frequencies_are_the_probabilities(options):
    logits, params, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 2.5]), SamplingParams(**options), 20000
    found = torch.bincount(sample(logits.expand(count, -1), [Row(params, 7) for _ in range(count)], range(count)), minlength=8) / count
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
    assert sample(torch.tensor([[-math.inf, 1e30, -1e30, 0.0]]), [Row(SamplingParams(), 1)], [1]).tolist() == [1]
    biased = SamplingParams(logit_bias={0: -math.inf, 3: -math.inf})
    found = sample(torch.zeros(500, 4), [Row(biased, 1) for _ in range(500)], range(500))
    assert set(found.tolist()) == {1, 2}


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"repetition_penalty": 2.0},
     {"logit_bias": {1: 1.0}}, {"top_k": 3, "top_p": 0.1, "min_p": 0.2, "frequency_penalty": 1.0, "logit_bias": {2: -1.0}}],
    ids=str,
)  # fmt: skip
def test_rows_whose_largest_logit_is_not_finite_get_no_token(options):
    """And the rows beside them get what they get alone."""
    wrong = [[math.nan] * 6, [0.0, math.nan, 3.0, 0, 0, 0], [math.inf, 0.0, 0.0, 5.0, 0, 0], [-math.inf] * 6, [math.inf] * 6]
    right = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    logits = torch.stack([row for pair in zip(right, torch.tensor([*wrong, right[5].tolist()])) for row in pair])
    rows = [Row(SamplingParams(**options), n, [n % 6, 1, 1], 1) for n in range(len(logits))]
    found = sample(logits, rows, range(len(rows))).tolist()
    alone = [int(sample(logits[n : n + 1], [row], [n])) for n, row in enumerate(rows)]
    assert found == alone
    assert [token == NO_TOKEN for token in found] == [n % 2 == 1 and n < 10 for n in range(12)]


def test_tokens_beyond_the_vocabulary_of_the_tokenizer_are_never_sampled():
    logits = torch.zeros(200, 8)
    logits[:, 6] = 100
    found = sample(logits, [Row(SamplingParams(temperature=n % 2), 1) for n in range(200)], range(200), vocab_size=5)
    assert int(found.max()) < 5


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": math.inf}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2}, {"n": 0},
     {"max_tokens": -1}, {"logprobs": 21}, {"repetition_penalty": 0}, {"seed": 2**64}, {"presence_penalty": math.nan},
     {"temperature": 10**400}, {"presence_penalty": -(10**400)}, {"frequency_penalty": 10**400}, {"repetition_penalty": 10**400},
     {"late_stop": ("a",)}],
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
     {"include_stop": 0}, {"constraint": 3}, {"prelude": 3}],
    ids=str,
)  # fmt: skip
def test_values_of_wrong_types_are_refused(options):
    (name,) = options
    with pytest.raises(DtypeError, match=f"SamplingParams: {name} must be"):
        SamplingParams(**options)
