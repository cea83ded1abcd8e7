"""States as objects: kept, forked, saved to files, refused where they do not fit. And the pool that they come from."""

import ctypes
import hashlib
import json
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, model_of, randomised
from sampling import every, slow

from penstock.engine import Engine, SamplingParams
from penstock.engine.request import Request, Sequence
from penstock.engine.state_pool import StatePool
from penstock.engine.states import fingerprint
from penstock.errors import EngineError, PenstockError, RangeError, ShapeError
from penstock.models import CausalLM
from penstock.models.arguments import named_tensors

pytestmark = pytest.mark.sampled(file=True)

NAMES = [*ARCHITECTURES]
PROMPT = [n * n % 13 for n in range(150)]
KEEP = SamplingParams(max_tokens=30, seed=5, keep_state=True)


def engine_of(name="rwkv6", **options) -> Engine:
    return Engine(model_of(name), slots=2, token_budget=256, **options)


def run(engine, request):
    while not request.done:
        engine.step()
    assert request.result.error is None
    return request.result


def whole(engine, more, count):
    """Tokens after the first 30, and after ``more`` of a next turn, of one engine without a cache."""
    first = engine.generate([PROMPT], SamplingParams(max_tokens=30 + count, seed=5))[0].tokens
    turn = engine.generate([PROMPT + first[:30] + more], SamplingParams(max_tokens=count, temperature=0))[0].tokens
    return first, turn


@pytest.mark.parametrize("name", every(3, NAMES))
def test_a_state_continues_from_memory_and_from_a_file(name, tmp_path):
    engine, more = engine_of(name, cache_bytes=0), [1, 2, 3]
    first, turn = whole(engine, more, 12)
    state = engine.generate([PROMPT], KEEP)[0].completions[0].state
    assert state.tokens == (*PROMPT, *first[:30])
    assert state.aligned == 128
    engine.save_state(state, tmp_path / "a.safetensors")
    for other, some in ((engine, state), (fresh := engine_of(name), fresh.load_state(tmp_path / "a.safetensors"))):
        continued = run(other, other.submit((), SamplingParams(max_tokens=12, seed=5), state=some))
        assert continued.tokens == first[30:]
        assert run(other, other.submit(more, SamplingParams(max_tokens=12, temperature=0), state=some)).tokens == turn


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_state_is_as_safetensors_writes_it(name, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    engine = engine_of(name)
    engine.save_state(engine.generate([PROMPT], KEEP)[0].completions[0].state, tmp_path / "a", {"a": "\u00e9"})
    with safe_open(tmp_path / "a", "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "b", metadata=about)
    ends = [(tmp_path / one).read_bytes().partition(b'"tokens":')[2].partition(b"}}")[2].lstrip() for one in "ab"]
    assert ends[0] == ends[1]
    assert len(ends[0]) > 180 * 8
    assert about["a"] == "\u00e9"


def test_saving_keeps_nothing_for_each_number_of_tokens(tmp_path):
    engine = engine_of()
    state = engine.generate([PROMPT], KEEP)[0].completions[0].state
    engine.save_state(state, tmp_path / "a")
    kept = len(ctypes._pointer_type_cache)
    for count in range(130, 180):
        engine.save_state(replace(state, tokens=state.tokens[:count]), tmp_path / "a")
    assert len(ctypes._pointer_type_cache) == kept


@pytest.mark.parametrize("size", [1, 63, 64, 128, 150])
def test_the_state_of_a_prompt_continues(size, tmp_path):
    """Of ``max_tokens`` 0: there is no token behind the prompt."""
    engine = engine_of(cache_bytes=0)
    prompt, more = PROMPT[:size], [5, 6]
    wanted = engine.generate([[*prompt, *more]], SamplingParams(max_tokens=9, temperature=0))[0].tokens
    result = engine.generate([prompt], SamplingParams(max_tokens=0, n=2, keep_state=True))[0]
    assert [(one.tokens, one.finish_reason) for one in result.completions] == [([], "length")] * 2
    for one in result.completions:
        assert one.state.tokens == tuple(prompt)
        engine.save_state(one.state, tmp_path / "a")
        state = engine.load_state(tmp_path / "a")
        assert run(engine, engine.submit(more, SamplingParams(max_tokens=9, temperature=0), state=state)).tokens == wanted
    if size % 64 == 0:
        with pytest.raises(ShapeError, match="prompt must be at least one token after a state"):
            engine.submit((), state=state)
    else:
        whole = engine.generate([prompt], SamplingParams(max_tokens=9, temperature=0))[0]
        assert run(engine, engine.submit((), SamplingParams(max_tokens=9, temperature=0), state=state)).tokens == whole.tokens
    engine.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_request_is_forked(overlap):
    engine = engine_of(overlap=overlap, cache_bytes=0)
    parent = engine.submit(PROMPT, SamplingParams(max_tokens=60, seed=5))
    with pytest.raises(EngineError, match="must be running in this engine and past its prompt"):
        engine.state_of(parent)
    while len(parent.result.tokens) < 20:
        engine.step()
    fork = engine.fork(parent)
    done = len(fork.prompt) - len(PROMPT)
    assert run(engine, fork).tokens[: 60 - done] == run(engine, parent).tokens[done:]
    with pytest.raises(EngineError, match="set keep_state"):
        engine.fork(parent)
    engine.check_integrity()


@pytest.mark.parametrize("canonical", [True, *slow(False)])
def test_a_state_from_outside_never_enters_the_cache(tmp_path, canonical):
    """Other requests get states of the cache by their tokens. Those of a file or of ``replace`` may be of other tokens."""
    engine, greedy = engine_of(batch_invariant=canonical), SamplingParams(max_tokens=80, temperature=0, keep_state=True)
    prompt = [n % 13 for n in range(300)]
    wanted = engine_of(cache_bytes=0, batch_invariant=canonical).generate([prompt], greedy)[0].tokens
    own = run(engine, engine.submit([5, 4, 3] * 30, KEEP)).completions[0].state
    engine.save_state(replace(own, tokens=tuple(prompt[: len(own.tokens)])), tmp_path / "a.safetensors")
    for state in (engine.load_state(tmp_path / "a.safetensors"), replace(own, tokens=tuple(prompt[: len(own.tokens)]))):
        first = run(engine, engine.submit(prompt[len(state.tokens) :], greedy, state=state, boundaries=[64, 128]))
        second = run(engine, engine.submit([], greedy, state=first.completions[0].state))
        assert first.tokens != wanted
        for tokens in (prompt, [*prompt, *first.tokens], [*prompt, *first.tokens, *second.tokens, 1]):
            assert engine.generate([tokens], SamplingParams(max_tokens=0))[0].cached_tokens == 0
            engine._cache.clear()
    assert engine.generate([prompt], greedy)[0].tokens == wanted
    turn = [*own.tokens, *range(13)] * 2
    run(engine, engine.submit(turn[len(own.tokens) :], greedy, state=own))
    assert engine.generate([turn], greedy)[0].cached_tokens >= 192, "states that continue one of this engine are kept"


@pytest.mark.parametrize("function", ["state_of", "fork"])
def test_a_request_of_another_engine_is_refused(function):
    """Its slot has the state of another sequence, or none, in this engine."""
    engine, other = engine_of(), engine_of()
    requests = [one.submit(PROMPT, SamplingParams(max_tokens=50)) for one in (engine, other)]
    for _ in range(4):
        engine.step(), other.step()
    with pytest.raises(EngineError, match=r"completion 0 must be running in this engine .* got one that is not"):
        getattr(engine, function)(requests[1])
    with pytest.raises(RangeError, match="index must be"):
        getattr(engine, function)(requests[0], index=-1)
    assert getattr(other, function)(requests[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_the_state_of_a_prompt_that_is_preempted_behind_its_last_token(overlap):
    """If steps overlap, it loses its slot before the result of its last step is processed."""
    engine, prompt = Engine(model_of("gla"), slots=1, token_budget=200, overlap=overlap, cache_bytes=0), [n % 13 for n in range(40)]
    request = engine.submit(prompt, SamplingParams(max_tokens=0, keep_state=True))
    engine.step()
    other = engine.submit([3], SamplingParams(max_tokens=3), priority=1)
    while not (request.done and other.done):
        engine.step()
    assert request.result.error is None
    params = SamplingParams(max_tokens=20, seed=1)
    (wanted,) = engine.generate([prompt], params)
    found = engine.submit((), params, state=request.result.completions[0].state)
    while not found.done:
        engine.step()
    assert found.result.tokens == wanted.tokens


def test_files_of_other_models_layouts_and_dtypes_are_refused(tmp_path):
    engine, path = engine_of(), tmp_path / "a.safetensors"
    state = engine.generate([PROMPT], KEEP)[0].completions[0].state
    engine.save_state(state, path)
    other = model_of("rwkv6")
    randomised(other, seed=9)
    with pytest.raises(RangeError, match=r"load_state: the model of the file must be .*, got .*continues with the model"):
        Engine(other, slots=2, token_budget=256).load_state(path)
    with pytest.raises(RangeError, match="the architecture of the file must be 'gla', got 'rwkv6'"):
        engine_of("gla").load_state(path)
    with pytest.raises(RangeError, match="the dtype of the file must be 'float64', got 'float32'"):
        Engine(model_of("rwkv6", torch.float64), slots=2, token_budget=256).load_state(path)
    with pytest.raises(RangeError, match="got one of another model"):
        Engine(other, slots=2, token_budget=256).save_state(state, path)
    with pytest.raises(RangeError, match="state must be of this model"):
        Engine(other, slots=2, token_budget=256).submit([1], state=state)
    (tmp_path / "b").write_bytes(b"no such file")
    with pytest.raises(RangeError, match="path must be a file that save_state wrote"):
        engine.load_state(tmp_path / "b")


def test_a_file_with_a_wrong_tensor_is_refused(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    engine, path = engine_of(), tmp_path / "a.safetensors"
    engine.save_state(engine.generate([PROMPT], KEEP)[0].completions[0].state, path)
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({**tensors, "state[1].mixer.wkv": torch.zeros(3)}, path, metadata=about)
    with pytest.raises(ShapeError, match=r"state\[1\].mixer.wkv must be torch.float32 \[3, 8, 8\], got torch.float32 \[3\]"):
        engine.load_state(path)
    save_file({**tensors, "tokens": tensors["tokens"][:-1]}, path, metadata=about)
    with pytest.raises(RangeError, match="the tokens of the file must be 180 of them, got 179"):
        engine.load_state(path)
    aligned = "the aligned length of the file must be a multiple of 64, at most its 180 tokens, got"
    for change, more, said in [
        ({0: 13}, {}, "the tokens of the file must be from 0 to 12, got 13"),
        ({179: -1, 3: 2**62}, {}, f"the tokens of the file must be from 0 to 12, got {2**62}"),
        ({}, {"aligned": "65"}, f"{aligned} '65'"),
        ({}, {"aligned": "192"}, f"{aligned} '192'"),
        ({}, {"aligned": "-64"}, f"{aligned} '-64'"),
        ({}, {"aligned": "many"}, f"{aligned} 'many'"),
        ({}, {"aligned": None}, f"{aligned} None"),
    ]:
        changed = tensors["tokens"].clone()
        for place, token in change.items():
            changed[place] = token
        save_file({**tensors, "tokens": changed}, path, metadata={k: v for k, v in {**about, **more}.items() if v is not None})
        with pytest.raises(RangeError, match=said):
            engine.load_state(path)
    for wrong in (tensors["tokens"].float(), tensors["tokens"][:, None].contiguous(), torch.tensor(3)):
        save_file({**tensors, "tokens": wrong}, path, metadata=about)
        with pytest.raises(ShapeError, match=r"the tokens of the file must be torch.int64 with one axis, got torch"):
            engine.load_state(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_pool_are_copied_whole(name, dtype):
    pool = StatePool(model_of(name).to(dtype), slots=3)
    slots = [pool.allocate() for _ in range(3)]
    assert pool.allocate() is None
    tensors = dict(named_tensors(pool.state))
    parts = {place.name: tensors[place.name] for place in pool.layout if 0 not in place.shape}  # those in pages are in no row
    for number, x in enumerate(parts.values()):
        x.copy_(torch.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1)) + 10 * number)
    rows = pool.copy_out([pool.live(1), pool.aligned(2)])
    found = pool.tensors(rows[1])
    assert all(torch.equal(found[name], x[pool.aligned(2)]) for name, x in parts.items())
    pool.promote([0, 2])
    pool.copy_in([pool.live(1)], rows[1:].clone())
    for x in parts.values():
        for live, source in ((0, 3), (1, 5), (2, 5)):
            assert torch.equal(x[live], x[source])
        x[:3] += 100
    for x in parts.values():
        x[:3] += 100
    pool.align([2, 1])
    for x in parts.values():
        for live, source, equal in ((0, 3, False), (1, 4, True), (2, 5, True)):
            assert torch.equal(x[live], x[source]) == equal
    pool.promote([0])
    for slot in slots:
        pool.release(slot)
    with pytest.raises(PenstockError, match="which is free"):
        pool.release(0)
    pool.allocate()
    used = [slot for slot in range(3) if slot in pool._taken]
    for _, x in named_tensors(pool.state):
        assert not x[pool.live(used[0])].any()
    pool.check_integrity(used)
    for wrong in ([], [0, 1, 2], used * 2):
        with pytest.raises(PenstockError, match="taken slots must be those in use"):
            pool.check_integrity(wrong)


def test_a_state_that_does_not_begin_with_zeros(monkeypatch):
    """Slots begin with whatever ``initial_state`` gives."""
    model = model_of("gla")
    whole = CausalLM.initial_state

    def ones(self, count, **options):
        state = whole(self, count, **options)
        for _, x in named_tensors(state):
            x.fill_(1)
        return state

    monkeypatch.setattr(CausalLM, "initial_state", ones)
    pool = StatePool(model, slots=2)
    pool.memory.zero_()
    slot = pool.allocate()
    for _, x in named_tensors(pool.state):
        assert (x[pool.live(slot)] == 1).all()
        assert not x[pool.live(1 - slot)].any()


def test_requests_begin_with_a_random_seed():
    assert Request([1], SamplingParams()).seed != Request([1], SamplingParams()).seed
    assert Sequence(Request([1], SamplingParams())).length == 0


def test_many_rows_of_a_pool_are_copied_together():
    pool = StatePool(model_of("rwkv6"), slots=7)
    pool.memory.copy_(torch.arange(pool.memory.numel()).view_as(pool.memory))
    before, slots = pool.memory.clone(), [6, 0, 2, 3, 5]
    pool.align(slots)
    for slot in range(7):
        assert torch.equal(pool.memory[pool.aligned(slot)], before[slot if slot in slots else pool.aligned(slot)])
        assert torch.equal(pool.memory[slot], before[slot])


def test_the_fingerprint_of_a_model_needs_no_numpy(monkeypatch):
    wanted = hashlib.sha256(json.dumps(model_of("rwkv6").config.to_dict(), sort_keys=True).encode())
    for name, x in model_of("rwkv6").state_dict().items():
        wanted.update(f"{name} {x.dtype} {list(x.shape)}".encode() + x.contiguous().numpy().tobytes())
    monkeypatch.setattr(torch.Tensor, "numpy", lambda _: pytest.fail("numpy is used"))
    assert fingerprint(model_of("rwkv6")) == wanted.hexdigest()
