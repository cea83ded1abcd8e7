"""The cache of prefixes: a radix tree with a budget, alone and in the engine."""

import random
from dataclasses import dataclass

import pytest
from architectures import model_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import Engine, SamplingParams
from penstock.engine.state_cache import StateCache
from penstock.errors import DtypeError


@dataclass(eq=False)
class Fake:
    """A state that says which prefix it is of."""

    key: tuple
    nbytes: int = 10
    logits: object = None
    on_host: bool = False


def cache_of(budget=10**6, host=0) -> StateCache:
    def moved(state, on_host):
        return Fake(state.key, state.nbytes, state.logits, on_host)

    return StateCache(budget, host, lambda state: moved(state, True), lambda state: moved(state, False))


def blocks(*kinds) -> tuple:
    """64 tokens of each kind."""
    return tuple(token for kind in kinds for token in [kind] * 64)


def insert(cache, key, **options):
    cache.insert(key, Fake(key, **options))


def test_the_longest_prefix_is_found():
    cache = cache_of()
    for kinds in [(1,), (1, 2, 3), (1, 2, 4), (5,)]:
        insert(cache, blocks(*kinds))
    for tokens, length, known in [
        (blocks(1, 2, 3, 9), 192, 192), (blocks(1, 2), 64, 128), (blocks(1, 2, 4), 64, 192), (blocks(6), 0, 0), (blocks(5, 5), 64, 64),
        (blocks(1) + (2,) * 10 + (9,), 64, 74), ((), 0, 0),
    ]:  # fmt: skip
        found, state, shared = cache.lookup(tokens)
        assert (found, shared) == (length, known)
        assert state is None if length == 0 else state.key == tokens[:length]


def test_a_prefix_of_all_tokens_needs_logits():
    cache = cache_of()
    insert(cache, blocks(1))
    insert(cache, blocks(1, 2))
    assert cache.lookup(blocks(1, 2))[0] == 64
    insert(cache, blocks(1, 2), logits="known")
    assert cache.lookup(blocks(1, 2))[0] == 128
    insert(cache, blocks(1, 2))  # does not lose them
    assert cache.lookup(blocks(1, 2))[0] == 128
    assert len(cache) == 2


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 30), st.sampled_from(["", "a"])),
        max_size=60,
    ),
    st.integers(0, 60),
)
def test_budgets_hold_and_hits_are_prefixes(actions, host):
    """Compared with a dictionary of what was ever stored."""
    cache, stored = cache_of(100, host), set()
    for store, kinds, size, salt in actions:
        key = blocks(*kinds)
        if store:
            cache.insert(key, Fake((salt, *key), size, 0), salt)
            stored.add((salt, *key))
        else:
            length, state, _ = cache.lookup(key, salt)
            assert length == 0 or (state.key == (salt, *key[:length]) and state.key in stored and not state.on_host)
        assert cache.bytes <= 100
        assert cache.host_bytes <= host
        entries = list(cache._entries)
        assert cache.bytes == sum(one.state.nbytes for one in entries if not one.on_host)
        assert cache.host_bytes == sum(one.state.nbytes for one in entries if one.on_host)
        assert all(cache.contains(one.state.key[1:], one.state.key[0]) and one.on_host == one.state.on_host for one in entries)
        nodes = sum(count_nodes(root) for root in cache._roots.values())
        assert len(cache._roots) <= len({one.salt for one in entries})
        assert nodes <= 2 * len(entries) + len(cache._roots)


def count_nodes(node) -> int:
    return 1 + sum(count_nodes(child) for child in node.children.values())


def test_prefixes_serve_requests_of_their_salt_only():
    """Whatever made the state: a prompt, a chunk of a long one, generated tokens, a fork. Results have equal bits all the same."""
    engine = Engine(model_of("gla"), slots=3, token_budget=256, keep_every=64)
    prompt, params = [n % 11 for n in range(130)], SamplingParams(max_tokens=65, seed=3, n=2, logprobs=1)

    def run(salt, prompt=prompt):
        request = engine.submit(prompt, params, cache_salt=salt)
        while not request.done:
            engine.step()
        return request.result

    one, other, again = run("a"), run("b"), run("a")
    assert (one.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 128)
    turn = prompt + one.tokens
    assert run("", turn).cached_tokens == 0
    assert run("b", turn).cached_tokens == run("a", turn).cached_tokens == 192
    for result in (other, again):
        assert [(some.tokens, some.logprobs) for some in result.completions] == [(some.tokens, some.logprobs) for some in one.completions]
    with pytest.raises(DtypeError, match="submit: cache_salt must be a text"):
        engine.submit(prompt, params, cache_salt=1)


def test_salts_without_states_are_forgotten():
    cache = cache_of(20)
    for n in range(100):
        cache.insert(blocks(1), Fake(blocks(1)), str(n))
    assert len(cache._roots) == len(cache) == 2


def test_what_saves_little_work_for_its_bytes_leaves_first():
    cache = cache_of(30)
    insert(cache, blocks(1, 1, 1, 1))
    insert(cache, blocks(1, 1, 1, 1, 2))  # 64 tokens more
    insert(cache, blocks(3, 3, 3))
    insert(cache, blocks(4, 4))
    assert not cache.contains(blocks(1, 1, 1, 1, 2))
    assert all(cache.contains(key) for key in (blocks(1, 1, 1, 1), blocks(3, 3, 3), blocks(4, 4)))


def test_what_is_not_used_leaves():
    cache = cache_of(30)
    insert(cache, blocks(1, 1, 1))
    insert(cache, blocks(2, 2))
    for n in range(3, 20):
        insert(cache, blocks(n))
        assert cache.lookup(blocks(2, 2, 9))[0] == 128
    assert not cache.contains(blocks(1, 1, 1))


def test_states_that_leave_the_device_come_back_from_the_host():
    cache = cache_of(20, 100)
    for n in range(6):
        insert(cache, blocks(n))
    assert (cache.bytes, cache.host_bytes) == (20, 40)
    for n in range(6):
        length, state, _ = cache.lookup(blocks(n, 9))
        assert length == 64
        assert not state.on_host
    assert cache.counts.evictions == 0


def prompts_of_a_conversation(rng, engine):
    """Each turn is the earlier one, its answer, and some tokens more."""
    prompt = [rng.randrange(13) for _ in range(100)]
    for _ in range(4):
        result = engine.generate([prompt], SamplingParams(max_tokens=50, temperature=0, logprobs=0))[0]
        yield prompt, result
        prompt = [*prompt, *result.tokens, *(rng.randrange(13) for _ in range(20))]


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7", "mamba2"])
def test_a_conversation_begins_at_its_last_multiple_of_64(name):
    model, engine = model_of(name), None
    engine = Engine(model, slots=2, token_budget=256)
    for turn, (prompt, result) in enumerate(prompts_of_a_conversation(random.Random(name), engine)):
        assert result.cached_tokens == (0 if turn == 0 else (len(prompt) - 21) // 64 * 64)
        cold = Engine(model, slots=2, token_budget=256, cache_bytes=0).generate([prompt], SamplingParams(max_tokens=50, temperature=0))[0]
        assert cold.tokens == result.tokens


def test_an_exact_hit_computes_nothing_of_the_prompt():
    engine = Engine(model_of("gla"), slots=4, token_budget=256)
    prompt = [n % 13 for n in range(128)]
    for n in (1, 3):
        params = SamplingParams(max_tokens=5, seed=3, n=n)
        first, before = engine.generate([prompt], params)[0], engine.stats.prompt_tokens
        again = engine.generate([prompt], params)[0]
        assert engine.stats.prompt_tokens == before
        assert again.cached_tokens == 128
        assert [one.tokens for one in first.completions] == [one.tokens for one in again.completions]
    scored = engine.generate([prompt], SamplingParams(max_tokens=0))[0]
    assert scored.completions[0].finish_reason == "length"


def test_states_are_kept_at_boundaries_and_branches():
    engine = Engine(model_of("gla"), slots=4, token_budget=512, keep_every=256)
    stem, params = [n % 11 for n in range(300)], SamplingParams(max_tokens=1)
    request = engine.submit(stem, params, boundaries=(70, 200))
    while not request.done:
        engine.step()
    kept = {one.length for one in engine._cache._entries}
    assert kept == {64, 192, 256}
    engine.generate([stem[:150] + [12] * 30], params)  # leaves the stem at 150
    assert engine._cache.contains(stem[:128])
    assert engine.generate([stem[:150] + [11] * 30], params)[0].cached_tokens == 128


def test_boundaries_behind_a_state_count_from_its_end():
    engine = Engine(model_of("gla"), slots=2, token_budget=512, keep_every=1024)
    params = SamplingParams(max_tokens=1, keep_state=True, seed=1)
    first = engine.generate([[n % 11 for n in range(100)]], params)[0].completions[0].state
    assert len(first.tokens) == 101
    request = engine.submit([n % 7 for n in range(300)], params, state=first, boundaries=(100,))
    while not request.done:
        engine.step()
    assert 192 in {one.length for one in engine._cache._entries}


def test_states_are_kept_at_regular_places_of_prompts_and_generated_tokens():
    engine = Engine(model_of("gla"), slots=2, token_budget=256, keep_every=128)
    request = engine.submit([n % 13 for n in range(300)], SamplingParams(max_tokens=10**15, temperature=0, n=2))
    while min(len(one.tokens) for one in request.result.completions) < 400:
        engine.step()
    kept = sorted(entry.length for entry in engine._cache._entries)
    assert set(kept) == {128, 256, 384, 512, 640}
    engine.close()


def test_a_small_budget_is_held():
    model = model_of("rwkv5.2")
    row = Engine(model, slots=1, token_budget=200)._pool.row_bytes
    engine = Engine(model, slots=3, token_budget=200, cache_bytes=3 * row, host_cache_bytes=2 * row, keep_every=64)
    rng = random.Random(0)
    for _ in range(12):
        engine.generate([[rng.randrange(13) for _ in range(200)]], SamplingParams(max_tokens=2))
        stats = engine.stats
        assert stats.cache_bytes <= 3 * row
        assert engine._cache.host_bytes <= 2 * row
    assert stats.cache.evictions > 0
