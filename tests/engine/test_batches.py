"""A request's tokens do not depend on the requests beside it, nor on cuts, the cache, forks and preemption."""

import random

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from sampling import every
from whole_texts import check_logprobs

from penstock.engine import Engine, SamplingParams, invariance
from penstock.errors import EngineError
from penstock.layers.modes import rows_alike

pytestmark = pytest.mark.sampled(file=True)

NAMES = [*ARCHITECTURES]
VOCAB = 13


def drawn_params(rng: random.Random) -> SamplingParams:
    kind = rng.randrange(5)
    options = {"max_tokens": rng.choice([0, 1, 5, 10, 70]), "seed": rng.getrandbits(40), "logprobs": rng.choice([None, 0, 3])}
    if kind == 0:
        return SamplingParams(temperature=0, **options)
    if kind == 1:
        return SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.3, **options)
    if kind == 2:
        return SamplingParams(top_k=5, stop_ids=(4,), **options)
    if kind == 3:
        return SamplingParams(min_p=0.05, logit_bias={3: -1.0, 7: 0.5}, prompt_logprobs=2, **options)
    return SamplingParams(n=3, **options)


def drawn_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Some share long prefixes."""
    stems = [[rng.randrange(VOCAB) for _ in range(200)] for _ in range(3)]
    prompts = []
    for _ in range(count):
        tail = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 30, 64, 100]))]
        prompts.append(rng.choice(stems)[: rng.choice([0, 64, 100, 128, 192])] + tail)
    return prompts


def completions(result) -> list:
    assert result.error is None
    return [(one.tokens, [found.token for found in one.logprobs], one.finish_reason) for one in result.completions]


class Alone:
    """An engine without a cache that runs one request at a time."""

    def __init__(self, model, **options):
        self.engine = Engine(model, slots=3, token_budget=512, cache_bytes=0, **options)

    def __call__(self, prompt, params):
        return self.engine.generate([prompt], params)[0]


def together(model, prompts, all_params, rng, **options):
    """The requests of a crowd: they arrive over several steps with different priorities and shares, some others are cancelled or forked."""
    engine = Engine(model, **{"slots": 9, "token_budget": 9 + 128, "prompt_budget": 128, "keep_every": 64, **options})
    requests, forks = [], []
    left = list(zip(prompts, all_params))
    while left or not all(request.done for request in requests):
        for _ in range(rng.randrange(6)):
            if left:
                share = rng.choice("ab"), rng.choice("cd")
                requests.append(engine.submit(*left.pop(0), priority=rng.randrange(3), share=share))
        if rng.random() < 0.2:  # one that is cancelled
            other = engine.submit([1, 2, 3], SamplingParams(max_tokens=50), priority=rng.randrange(4))
            engine.step()
            engine.cancel(other)
        running = [request for request in requests if not request.done and request.params.n == 1]
        if running and rng.random() < 0.1:
            try:
                parent = rng.choice(running)
                given = engine.state_of(parent)
                params = SamplingParams(max_tokens=30, temperature=0, logprobs=1)
                forks.append((list(given.tokens), params, engine.submit((), params, state=given)))
            except EngineError:  # it is not past its prompt
                pass
        engine.step()
        engine.check_integrity()
    while not all(fork.done for _, _, fork in forks):
        engine.step()
    engine.check_integrity()
    assert engine.stats.running == engine.stats.waiting == 0
    return engine, [request.result for request in requests], [(tokens, params, fork.result) for tokens, params, fork in forks]


@pytest.mark.parametrize("name", every(7, NAMES))
def test_requests_give_the_tokens_of_each_alone(name):
    rng = random.Random(name)
    overlap = rng.random() < 0.5
    model = model_of(name)
    prompts = drawn_prompts(rng, 64 if name in ("rwkv6", "gla", "mamba2") else 24)
    params = [drawn_params(rng) for _ in prompts]
    engine, results, forks = together(model, prompts, params, rng, overlap=overlap)
    assert engine.stats.cache.hits > 2
    alone = Alone(model)
    for prompt, some, result in zip(prompts, params, results):
        assert completions(result) == completions(alone(prompt, some)), (len(prompt), some)
        check_logprobs(model, prompt, some, result)
    for tokens, some, result in forks:
        assert completions(result) == completions(alone(tokens, some))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_token_do_not_depend_on_its_place_in_a_step(name, dtype):
    """Every place, odd and even: low-rank maps of 5 and 6 channels are among these models'."""
    model = model_of(name, dtype)
    block, wanted = invariance.smallest_block(model, 100), None
    for tokens in (block, 2 * block, 5 * block):
        for place in range(tokens - invariance.LIVE):
            with rows_alike():
                found = invariance._probe(model, tokens, place, invariance.LIVE)
            wanted = wanted or found
            assert all(torch.equal(one, other) for one, other in zip(found, wanted)), (tokens, place)


@pytest.mark.parametrize("name", every(7, NAMES))
def test_batch_invariant_logprobs_are_equal_to_the_bit(name):
    rng, model = random.Random(name), model_of(name)
    prompts = drawn_prompts(rng, 6)
    params = [SamplingParams(max_tokens=70, seed=n, logprobs=2) for n in range(6)]
    engine, results, forks = together(model, prompts, params, rng, batch_invariant=True)
    alone = Alone(model, batch_invariant=True)
    for prompt, some, result in zip(prompts, params, results):
        assert result.completions == alone(prompt, some).completions
    assert forks
    for tokens, some, result in forks:
        assert result.completions == alone(tokens, some).completions
    turns = [prompt + result.tokens + [n] for n, (prompt, result) in enumerate(zip(prompts, results))]
    for turn, some, result in zip(turns, params, engine.generate(turns, params)):
        assert result.completions == alone(turn, some).completions


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_states_of_generated_tokens_are_those_of_a_prompt(name, overlap):
    """Canonical ones have equal bits and end with the prompt. Others have equal values, and are kept in the cache."""
    params = SamplingParams(max_tokens=150, seed=5, keep_state=not overlap)
    model, prompt = model_of(name), [n * n % VOCAB for n in range(150)]
    for canonical in (True, False):
        options = {"slots": 2, "token_budget": 256, "batch_invariant": canonical}
        engine = Engine(model, overlap=overlap, keep_every=64, **options)
        first = engine.generate([prompt], params)[0]
        cached = engine.generate([prompt + first.tokens], SamplingParams(max_tokens=0, keep_state=True))[0]
        assert cached.cached_tokens == (128 if canonical else 256)
        fresh = Engine(model, cache_bytes=0, **options)
        for one in (first, cached)[overlap:]:
            state = one.completions[0].state
            length = 128 if canonical and one is first else 256
            text = [*prompt, *first.tokens][: 300 if one is cached else length]
            wanted = fresh.generate([text], SamplingParams(max_tokens=0, keep_state=True))[0].completions[0].state
            assert (state.tokens, state.aligned) == ((*prompt, *first.tokens), length)
            found, right = (engine._pool.tensors(x.row) for x in (state, wanted))
            for key, x in found.items():
                bound = 0 if canonical or x.numel() == 0 else 1e-4 * float(right[key].abs().max())
                torch.testing.assert_close(x, right[key], rtol=0, atol=bound)
