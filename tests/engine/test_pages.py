"""Keys and values of hybrid models in pages: waiting, preemption, sharing, windows, states, and limits."""

import random
import re
from dataclasses import replace

import pytest
import torch
from architectures import ATTENDING, model_of
from whole_texts import check_logprobs

from penstock.engine import Engine, SamplingParams
from penstock.engine.pages import SharedPages
from penstock.errors import EngineError, OutOfMemory, PenstockError, RangeError, ShapeError
from penstock.layers import LinearAttentionConfig, SoftmaxAttentionConfig, SoftmaxAttentionState
from penstock.layers.arguments import mapped
from penstock.models import CausalLM, hybrid

PROMPT = [n * n % 13 for n in range(150)]


def greedy(count, **options):
    return SamplingParams(max_tokens=count, temperature=0, **options)


def finished(engine, *requests):
    steps = 0
    while not all(one.done for one in requests):
        engine.step()
        engine.check_integrity()
        steps += 1
        assert steps < 5000
    assert [one.result.error for one in requests] == [None] * len(requests)
    return [[completion.tokens for completion in one.result.completions] for one in requests]


def assert_free(engine):
    """Without kept prefixes, no page is in use."""
    engine.check_integrity()
    engine._cache.clear()
    assert engine.stats.free_pages == engine.stats.pages > 0
    engine.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ATTENDING)
def test_requests_that_wait_for_pages_give_equal_tokens(name, overlap):
    """Six sequences of up to 5 pages in 7 pages: they wait, and lose their pages."""
    model = model_of(name)
    prompts = [PROMPT[n : 30 + 40 * (n % 3)] for n in range(6)]
    params = [greedy(100 + 20 * (n % 4), n=1 + n % 2) for n in range(6)]
    wanted = Engine(model, slots=4, token_budget=256, cache_bytes=0).generate(prompts, params)
    engine = Engine(model, slots=4, token_budget=256, pages=7, max_length=320, overlap=overlap)
    preempted = []
    engine._steps.scheduler._on_preempt = lambda one: (preempted.append(one), engine._steps.entry.preempt(one))
    requests = [engine.submit(prompt, one) for prompt, one in zip(prompts, params)]
    assert finished(engine, *requests) == [[one.tokens for one in result.completions] for result in wanted]
    assert preempted or name == "hybrid_window"
    assert_free(engine)


@pytest.mark.parametrize("name", ATTENDING)
def test_there_may_be_fewer_pages_than_rows(name):
    """Rows of states are counted without pages, also where the first layer is softmax attention."""
    model = model_of(name)
    prompts = [PROMPT[n : 70 + n] for n in range(3)]
    wanted = Engine(model, slots=4).generate(prompts, greedy(3))
    engine = Engine(model, slots=4, pages=2, max_length=128)
    assert finished(engine, *(engine.submit(one, greedy(3)) for one in prompts)) == [[one.completions[0].tokens] for one in wanted]


@pytest.mark.parametrize("name", ATTENDING)
def test_slots_beyond_the_rows_are_refused(name):
    """However many pages there are."""
    model = model_of(name)
    pool = mapped(model.initial_state(2), lambda cache: cache.paged(9, 2), SoftmaxAttentionState)
    with pytest.raises(RangeError, match="advance: slots must be below the 2 rows of state, got 5"):
        model.advance(torch.tensor([[1], [2]]), pool, slots=torch.tensor([0, 5]))


def test_kept_prefixes_and_completions_share_pages():
    engine = Engine(model_of("hybrid"), slots=4, token_budget=1024, pages=40)
    request = engine.submit(PROMPT, greedy(30, n=4))
    while len(request.sequences) < 4 or any(one.slot is None for one in request.sequences):
        engine.step()
    assert engine.stats.pages - engine.stats.free_pages == 2 + 4  # two whole pages of the prompt, and the last one of each completion
    finished(engine, request)
    assert engine.stats.pages - engine.stats.free_pages == 2
    again = engine.submit([*PROMPT[:140], 5, 6], greedy(5))
    finished(engine, again)
    assert again.result.cached_tokens == 128
    assert engine.stats.pages - engine.stats.free_pages == 2
    assert_free(engine)


def test_kept_prefixes_give_way():
    engine = Engine(model_of("hybrid"), slots=2, token_budget=256, pages=5, max_length=320)
    for n in range(4):
        engine.generate([[n, *PROMPT[:130]]], greedy(1))
        engine.check_integrity()
    assert engine.stats.cache_entries == 2
    assert engine.stats.free_pages == 1
    engine.generate([[*PROMPT, *PROMPT]], greedy(20))
    assert_free(engine)


@pytest.mark.parametrize("canonical", [False, True])
def test_pages_before_the_window_are_free(canonical):
    """With canonical states, those of generated tokens stay: the next turn begins at the end of the prompt."""
    engine = Engine(model_of("hybrid_window"), slots=1, token_budget=128, batch_invariant=canonical, cache_bytes=0)
    request, most = engine.submit(PROMPT * 4, greedy(200)), 0
    while not request.done:
        engine.step()
        engine.check_integrity()
        most = max(most, engine.stats.pages - engine.stats.free_pages)
        if request.sequences[0].computed < 600:
            assert most <= 2
    assert most == (5 if canonical else 2)
    assert request.result.error is None
    assert_free(engine)


@pytest.mark.parametrize("name", ATTENDING)
def test_prefixes_come_back_from_the_host(name):
    """If there are too few pages for one, it is computed again."""
    model = model_of(name)
    engine = Engine(model, slots=2, token_budget=512, pages=6, max_length=384, cache_bytes=2**20, host_cache_bytes=2**22)
    prompts, params = [[n, *PROMPT[:140]] for n in range(4)], greedy(4, logprobs=1)
    first = [engine.generate([prompt], greedy(4))[0].tokens for prompt in prompts]
    engine.generate([[*PROMPT, *PROMPT]], greedy(30))  # needs all pages
    assert any(entry.on_host for entry in engine._cache._entries)
    assert engine.stats.cache_entries >= 4
    for prompt, tokens in zip(prompts, first):
        (found,) = engine.generate([prompt], params)
        assert (found.tokens, found.cached_tokens) == (tokens, 128)
        check_logprobs(model, prompt, params, found)
        engine.check_integrity()
    long = engine.submit([*PROMPT, *PROMPT[:100]], greedy(60))
    for _ in range(5):
        engine.step()
    assert finished(engine, engine.submit(prompts[0], greedy(4)), long)[0] == [first[0]]
    assert_free(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_forks_give_their_pages(overlap):
    """The completions of a request wait with references to its pages, while another one needs them."""
    model = model_of("hybrid_of_deltas")
    options = {"slots": 1, "token_budget": 256, "overlap": overlap, "cache_bytes": 0}
    wanted = Engine(model, **options).generate([PROMPT, [*PROMPT, *PROMPT]], [greedy(20, n=3), greedy(3)])
    engine = Engine(model, pages=5, max_length=320, **options)
    first = engine.submit(PROMPT, greedy(20, n=3))
    while sum(one.saved is not None for one in first.sequences) < 2:
        engine.step()
    second = engine.submit([*PROMPT, *PROMPT], greedy(3), priority=1)
    assert finished(engine, first, second) == [[one.tokens for one in result.completions] for result in wanted]
    assert_free(engine)


@pytest.mark.parametrize("name", ATTENDING)
def test_a_preempted_sequence_continues_from_the_host(name):
    model = model_of(name)
    (wanted,) = Engine(model, slots=1, token_budget=256).generate([PROMPT], greedy(90, keep_state=True))
    engine = Engine(model, slots=1, token_budget=256)
    request = engine.submit(PROMPT, greedy(90, keep_state=True))
    others = []
    while not request.done:
        engine.step()
        if len(request.result.tokens) % 40 == 10 and len(others) < 2:
            others.append(engine.submit([1, 2, 3], greedy(2), priority=1))
    assert len(others) == 2
    assert request.result.tokens == wanted.tokens
    for one, other in ((request.result.completions[0].state, wanted.completions[0].state),):
        assert torch.equal(one.row, other.row)
        assert torch.equal(one.pages, other.pages)
    finished(engine, *others)
    assert_free(engine)


def test_files_of_states_have_the_tokens_of_the_window(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    caches = {"hybrid": "state[1].mixer", "hybrid_window": "state[0].mixer", "rwkv7b": "state[1].mixer.cache"}
    for name, cache in caches.items():
        engine = Engine(model_of(name), slots=2, token_budget=256)
        state = engine.generate([PROMPT], greedy(60, keep_state=True))[0].completions[0].state
        assert state.aligned == 192
        engine.save_state(state, tmp_path / name)
        tensors, keys = load_file(tmp_path / name), f"{cache}.keys"
        assert tensors[keys].shape[0] == tensors[f"{cache}.values"].shape[0] == (1 if name == "hybrid_window" else 3)
        found = engine.load_state(tmp_path / name)
        assert torch.equal(found.pages, state.pages)
        with safe_open(tmp_path / name, "pt") as file:
            about = file.metadata()
        save_file({**tensors, keys: tensors[keys][1:].contiguous()}, tmp_path / "short", metadata=about)
        with pytest.raises(ShapeError, match=rf"{re.escape(keys)} must be torch.float32"):
            engine.load_state(tmp_path / "short")
        save_file({**tensors, keys: tensors[keys] * float("nan")}, tmp_path / "nan", metadata=about)
        with pytest.raises(RangeError, match=rf"{re.escape(keys)} must be finite numbers"):
            engine.load_state(tmp_path / "nan")


def test_limits_and_wrong_arguments():
    model = model_of("hybrid")
    engine = Engine(model, slots=2, token_budget=256, max_length=200)
    assert (engine.max_length, engine.stats.pages) == (200, 8)
    assert Engine(model, slots=2, token_budget=256).max_length == 1024
    assert Engine(model_of("gla"), slots=2, token_budget=256).max_length is None
    assert engine.generate([PROMPT], greedy(50))[0].error is None
    with pytest.raises(RangeError, match="submit: max_tokens must be at most 50 after 150 tokens, for max_length = 200, got 51"):
        engine.submit(PROMPT, greedy(51))
    with pytest.raises(RangeError, match="submit: prompt must be of at most max_length = 200 tokens, got 201 tokens"):
        engine.submit([*PROMPT, *PROMPT[:51]], greedy(0))
    state = engine.generate([PROMPT], greedy(40, keep_state=True))[0].completions[0].state
    with pytest.raises(RangeError, match="max_tokens must be at most 8 after 192 tokens"):
        engine.submit([1, 2], greedy(9), state=state)
    assert len(finished(engine, engine.submit([1, 2], greedy(8), state=state))[0][0]) == 8
    with pytest.raises(RangeError, match="Engine: pages must be at least 4, for a sequence of max_length = 200 tokens, got 3"):
        Engine(model, slots=2, token_budget=256, max_length=200, pages=3)
    for name in ("pages", "max_length"):
        with pytest.raises(RangeError, match=f"{name} must be None for a model without softmax attention, got 100"):
            Engine(model_of("gla"), slots=2, token_budget=256, **{name: 100})
        with pytest.raises(RangeError, match=f"{name} must be a whole number of at least 1, got 0"):
            Engine(model, slots=2, token_budget=256, **{name: 0})
    with pytest.raises(RangeError, match="states must be empty for a model with softmax attention, got 1 of them"):
        Engine(model, slots=2, token_budget=256, states={"a": model(torch.tensor([[1]])).state})
    with pytest.raises(OutOfMemory, match=r"slots and pages must fit into memory.*got 2 .* and 10{12} pages\. Lower slots, pages or max_l"):
        Engine(model, slots=2, token_budget=256, pages=10**12)


def test_states_of_other_growing_mixers_are_refused():
    class Growing(LinearAttentionConfig):
        kind, grows = "growing_for_test", True

    config = replace(model_of("linear").config, mixer=Growing(3))
    with pytest.raises(RangeError, match=r"model must be free of growing for test, got growing for test in layers \[0, 1\]"):
        Engine(CausalLM(config))


def test_wrong_counts_are_found():
    engine = Engine(model_of("hybrid"), slots=2, token_budget=256)
    pages = engine._pool.pages
    kept = SharedPages(pages, pages._taken(1, refer=False))
    with pytest.raises(PenstockError, match=r"got 1 in use, 0 expected, wrong counts of \[1\]"):
        engine.check_integrity()
    del kept
    engine.check_integrity()
    with pytest.raises(EngineError, match="must have 129 pages here, got 32 free ones"):
        pages._taken(129)


def test_layers_with_and_without_windows_keep_all_pages():
    config = model_of("gla").config
    for windows, most in (((70, None), 5), ((70, 10), 3)):
        layers = [SoftmaxAttentionConfig(2, window_size=window, max_length=512) for window in windows]
        one = hybrid(hybrid(replace(config, num_layers=3), layers[0], [0]), layers[1], [1])
        engine = Engine(CausalLM(one), slots=1, token_budget=256, cache_bytes=0)
        request, used = engine.submit(PROMPT, greedy(150)), 0
        while not request.done:
            engine.step()
            used = max(used, engine.stats.pages - engine.stats.free_pages)
        assert used == most
        assert_free(engine)


@pytest.mark.parametrize("cache_bytes", [0, 2**26])
def test_forks_that_begin_in_the_same_step_give_their_pages(cache_bytes):
    """Each has its own copy of the last page in part, and what it began with refers to the first one."""
    model, params = model_of("hybrid_of_deltas"), [greedy(60, n=3, logprobs=1), greedy(60, n=2, logprobs=1)]
    engine = Engine(model, slots=3, pages=6, max_length=256, cache_bytes=cache_bytes)
    requests = [engine.submit(PROMPT[:length], one) for length, one in zip((66, 130), params)]
    finished(engine, *requests)
    for request, one in zip(requests, params):
        check_logprobs(model, request.prompt, one, request.result)
    assert_free(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ATTENDING)
def test_many_requests_leave_no_page_behind(name, overlap):
    """Random requests, cancelled, forked, preempted and continued, in few pages. Each result is that of the whole text."""
    rng, model = random.Random(name), model_of(name)
    engine = Engine(
        model, slots=5, token_budget=5 + 128, prompt_budget=128, pages=9, max_length=300, keep_every=64, overlap=overlap,
        cache_bytes=2**16, host_cache_bytes=2**17,
    )  # fmt: skip
    stems, open_requests, texts, states, done = [PROMPT[n:] for n in (0, 3)], [], {}, [], 0
    while done < 60:
        if len(open_requests) < 12 and rng.random() < 0.4:
            state = rng.choice(states) if states and rng.random() < 0.3 else None
            prompt = [*rng.choice(stems)[: rng.choice([1, 64, 100, 140])], rng.randrange(13)]
            known = () if state is None else state.tokens
            prompt = prompt[: max(1, 200 - len(known))]
            count = rng.randrange(0, min(100, 300 - len(known) - len(prompt)))
            params = SamplingParams(
                max_tokens=count, n=rng.choice([1, 1, 3]), seed=rng.getrandbits(20), keep_state=rng.random() < 0.2 and len(known) < 150,
                logprobs=1,
            )  # fmt: skip
            share = rng.choice("ab"), rng.choice("cd")
            open_requests.append(engine.submit(prompt, params, state=state, priority=rng.randrange(2), share=share))
            texts[open_requests[-1]] = [*known, *prompt], params
        if open_requests and rng.random() < 0.05:
            engine.cancel(rng.choice(open_requests))
        engine.step()
        engine.check_integrity()
        for request in [one for one in open_requests if one.done]:
            open_requests.remove(request)
            done += 1
            assert request.result.error is None
            check_logprobs(model, *texts.pop(request), request.result)
            states += [one.state for one in request.result.completions if one.state is not None and len(one.state.tokens) < 150]
    for request in open_requests:
        engine.cancel(request)
    while engine.step():
        pass
    assert not engine._steps.requests
    assert_free(engine)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a kernel is broken")])
def test_failed_steps_leave_no_page_behind(error, monkeypatch):
    engine = Engine(model_of("hybrid"), slots=3, token_budget=256, pages=8, max_length=320)
    whole, calls = engine.model.advance, iter(range(10**6))

    def sometimes(*given, **options):
        if next(calls) % 9 == 8:
            raise error
        return whole(*given, **options)

    monkeypatch.setattr(engine.model, "advance", sometimes)
    requests = [engine.submit(PROMPT[: 40 + 30 * (n % 4)], greedy(4, n=1 + n % 3)) for n in range(12)]
    while engine.step():
        engine.check_integrity()
    assert all(one.done for one in requests)
    assert {one.result.error is None for one in requests} == {False, True}
    assert_free(engine)
