"""The CUDA kernels without a GPU: compiled for three architectures, emulated against the oracle, cached on disk, and their refusals."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import contract
import emulated
import pytest
import torch
from cases import SHARED, Case, Wanted, check_against, check_near_underflow, draw, long_cases, oracle, problem_of, upstream
from pools import Pooled
from sampling import every

import penstock as ps
from penstock.call.implementation import Upstream
from penstock.call.memory import Memory
from penstock.errors import PenstockError
from penstock.gpu import nvrtc
from penstock.gpu.target import Target
from penstock.recurrence import cuda, reference
from penstock.recurrence.cuda import launch
from penstock.recurrence.cuda.configuration import Configuration
from penstock.recurrence.cuda.sizes import HEADS
from penstock.recurrence.operators import ADVANCE, FAMILY, RECURRENCE
from penstock.tokens.shape import Shape
from penstock.tune.passes import without_memory

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CUDA = FAMILY.named("cuda")
RWKV6, RWKV5 = (Case(variant, H=2, K=32, V=32) for variant in ("rwkv6", "rwkv5"))
LENGTHS = (0, 5, 40, 0, 1, 33, 0)


pytestmark = pytest.mark.usefixtures("emulated_cuda")


def results(case: Case) -> dict[str, torch.Tensor]:
    """Output, final state and all gradients, from the implementation itself."""
    tensors = draw(case)
    problem = problem_of(case, tensors)
    output, final_state = CUDA.forward(problem)
    grads = CUDA.gradients(problem, Upstream(upstream(case)))
    return {"output": output, "final_state": final_state} | {f"d{name}": x for name, x in grads._asdict().items() if x is not None}


def cases() -> list[Case]:
    found = [replace(of, T=T) for of in (RWKV6, RWKV5) for T in (0, 1, 8, 16, 70)]
    found += [replace(RWKV6, T=20, B=1, K=64, V=64), replace(RWKV6, T=20, B=1, K=128, V=128), replace(RWKV5, T=20, B=1, K=128, V=128)]
    found += [replace(RWKV5, T=20, B=1, K=64, V=64, dtype=BFLOAT16), replace(RWKV6, T=20, dtype=FLOAT16)]
    found += [replace(RWKV6, T=9, dtype=BFLOAT16, others=FLOAT32), replace(RWKV5, T=9, others=FLOAT64)]
    found += [replace(of, T=70, gate=gate) for of in (RWKV6, RWKV5) for gate in ("zero", "gone", "mixture", "uneven")]
    found += [replace(of, lengths=LENGTHS) for of in (RWKV6, RWKV5)]
    found += [replace(RWKV6, lengths=LENGTHS, gate="mixture", reverse=True, state=False), replace(RWKV6, lengths=())]
    found += [replace(RWKV6, T=20, state=False, scale=-0.3), replace(RWKV5, T=20, reverse=True), replace(RWKV6, T=20, strided=True)]
    found += [replace(of, T=10, shared=axes) for of, axes in zip((RWKV6, RWKV5, RWKV6, RWKV5, RWKV6), SHARED)]
    found += [replace(RWKV6, B=3, T=11), replace(RWKV6, B=0, T=5), replace(RWKV6, B=1, H=1, T=600)]
    return found


@pytest.mark.parametrize("case", every(2, cases()), ids=str)
def test_equals_the_oracle(case):
    check_against(results(case), oracle(case), case.dtype)


LONG = [case for variant in ("rwkv6", "rwkv5") for case in long_cases(variant)]


@pytest.mark.parametrize("case", [LONG[2], *(pytest.param(case, marks=pytest.mark.slow) for case in LONG if case is not LONG[2])], ids=str)
def test_long_sequences_equal_the_oracle(case):
    case = replace(case, K=32, V=32)
    check_against(results(case), oracle(case), case.dtype)


@pytest.mark.parametrize("of", [RWKV6, RWKV5], ids=str)
def test_decay_gradients_near_underflow(of):
    check_near_underflow(replace(of, T=5, B=1, H=1), results)


ORDERED = [
    replace(RWKV6, T=70),
    replace(RWKV5, lengths=LENGTHS),
    pytest.param(replace(RWKV6, T=20, K=128, V=128), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_threads_may_run_in_any_order(case, monkeypatch):
    """Without a barrier, results depend on the order."""
    found = results(case)
    monkeypatch.setattr(launch, "run", partial(emulated.run, backwards=True))
    for name, x in results(case).items():
        assert torch.equal(x, found[name]), name


@pytest.mark.parametrize("variant", ["rwkv5", "rwkv6"])
def test_advance_equals_the_oracle(variant):
    case = Pooled(variant, H=2, K=32, V=32, lengths=(0, 1, 63, 64, 65, 130), slots=(4, 0, -1, 2, 7, 5))
    problem = contract.problem_of(case, case.tensors())
    case.check({"output": CUDA.advance(problem), "state": problem.state}, "cuda")


def test_emulation_finds_a_missing_barrier(monkeypatch):
    """Else the test above cannot fail."""
    whole = Configuration("forward", 32, FLOAT32, FLOAT32).source
    monkeypatch.setattr(Configuration, "source", whole.replace("__syncthreads();", "", 1))
    monkeypatch.setattr(emulated, "library", emulated.library.__wrapped__)
    case = replace(RWKV6, T=40)
    problem = problem_of(case, draw(case))
    found = CUDA.forward(problem)[0]
    monkeypatch.setattr(launch, "run", partial(emulated.run, backwards=True))
    assert not torch.equal(CUDA.forward(problem)[0], found)


def test_without_a_gradient_of_the_final_state():
    case = replace(RWKV6, T=20)
    problem = problem_of(case, draw(case))
    d_output, d_final_state = upstream(case)
    found, wanted = (CUDA.gradients(problem, Upstream((d_output, d))) for d in (None, torch.zeros_like(d_final_state)))
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("slots", [None, [3, -1, 0]], ids=["all rows", "slots"])
@pytest.mark.parametrize("of", [RWKV6, RWKV5, replace(RWKV6, shared="BNH"), replace(RWKV6, shared="overlap")], ids=str)
def test_advance_updates_its_rows_in_place(of, slots, dtype):
    tensors = draw(replace(of, B=3, T=2, dtype=dtype))
    rows = torch.tensor([0, 1, 2] if slots is None else slots)
    pool = torch.randn(3 if slots is None else 5, of.H, 32, 32).to(dtype)
    exact = pool.double()
    arguments = [tensors[name] for name in ("q", "k", "v", "g", "u")]

    def step(state, *inputs):
        given = (*inputs, None, None if slots is None else rows, state)
        return ADVANCE.checked(f"decode_step({of.variant!r})", given, (None,))

    wanted = reference.IMPLEMENTATION.advance(step(exact, *(x.double() for x in arguments)))
    found = CUDA.advance(step(pool, *arguments))
    exactly = {"output": wanted, "pool": exact}
    check_against({"output": found, "pool": pool}, {name: Wanted(x, float(x.norm())) for name, x in exactly.items()}, dtype)
    if slots is not None:
        assert not found[1].any()


def test_equal_calls_share_what_is_prepared(monkeypatch):
    """Values and addresses may differ; other strides are another call."""
    monkeypatch.setattr(RECURRENCE, "memory", Memory())
    case = replace(RWKV6, lengths=LENGTHS)
    tensors = draw(case)
    across = tensors["v"].transpose(1, 2).contiguous().transpose(1, 2)
    found = {}
    for name, v, prepared in (("first", tensors["v"], 2), ("negated", -tensors["v"], 2), ("across", across, 4), ("again", tensors["v"], 4)):
        problem = problem_of(case, tensors | {"v": v, "initial_state": torch.zeros_like(tensors["initial_state"])})
        found[name] = [*CUDA.forward(problem), *CUDA.gradients(problem, Upstream(upstream(case)))]
        assert sum(len(seen.bound) for seen in RECURRENCE.memory.calls.entries.values()) == prepared
    for x, negated, *others in zip(*found.values()):
        assert all(torch.equal(x, other) for other in others)
        assert torch.equal(x.abs(), negated.abs())
    assert torch.equal(found["first"][0], -found["negated"][0])


def configurations(head: int) -> list[Configuration]:
    """Those of models: decays in float32, gradients of constant decays in float32."""
    found = [Configuration("forward", head, dtype, FLOAT32) for dtype in (BFLOAT16, FLOAT16, FLOAT32)]
    found += [Configuration("backward", head, BFLOAT16, FLOAT32), Configuration("backward", head, FLOAT32, FLOAT32, static=True)]
    odd = Configuration("forward", head, BFLOAT16, BFLOAT16, BFLOAT16, FLOAT16, FLOAT64, torch.int32)
    return [*found, odd, replace(odd, direction="backward", tokens=FLOAT16, final_state=FLOAT32)]


ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_86", "sm_89", "sm_120")
SAMPLED = ("sm_90", 64)
OTHERS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in product(ARCHITECTURES, HEADS) if pair != SAMPLED]


@pytest.mark.parametrize(("arch", "head"), [SAMPLED, *OTHERS])
def test_kernels_compile_without_spills(arch, head):
    pytest.importorskip("cuda.core")
    told = {configuration: nvrtc.compiled(configuration, arch)[1] for configuration in configurations(head)}
    spills = {one: re.findall(r"(\d+) bytes spill (?:stores|loads)", log) for one, log in told.items()}
    assert all(len(found) == 2 for found in spills.values()), next(iter(told.values()))
    assert not [one for one, found in spills.items() if found != ["0", "0"]]


def test_machine_code_is_cached_and_broken_files_are_compiled_again(monkeypatch, tmp_path):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configuration = Configuration("forward", 32, FLOAT32, FLOAT32)
    code = nvrtc.machine_code(configuration, "sm_90")
    path = nvrtc.kept_at(configuration, "sm_90")
    kept = path.read_bytes()
    assert [one.name for one in path.parent.iterdir()] == [path.name]

    calls = []
    monkeypatch.setattr(nvrtc, "compiled", lambda *given: calls.append(given) or (code, ""))
    assert nvrtc.machine_code(configuration, "sm_90") == code
    assert not calls
    for broken in (b"", kept[:-1], kept[:40] + b"?" + kept[41:]):
        calls.clear()
        path.write_bytes(broken)
        assert nvrtc.machine_code(configuration, "sm_90") == code
        assert len(calls) == 1
        assert path.read_bytes() == kept


def test_file_names_hold_what_machine_code_depends_on(monkeypatch):
    pytest.importorskip("cuda.bindings")
    configuration = Configuration("forward", 32, FLOAT32, FLOAT32)
    names = {nvrtc.kept_at(one, "sm_90") for one in (configuration, replace(configuration, head=64), replace(configuration, gate=FLOAT64))}
    names |= {nvrtc.kept_at(configuration, "sm_80")}
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (99, 0))
    names |= {nvrtc.kept_at(configuration, "sm_90")}
    monkeypatch.setattr(Configuration, "source", "another")
    names |= {nvrtc.kept_at(configuration, "sm_90")}
    assert len(names) == 6


def test_an_unwritable_cache_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "compiled", lambda *given: (b"code", ""))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    assert nvrtc.machine_code(Configuration("forward", 32, FLOAT32, FLOAT32), "sm_90") == b"code"


def test_unknown_architectures_raise():
    pytest.importorskip("cuda.core")
    with pytest.raises(
        PenstockError, match=r"^cuda: NVRTC \d+\.\d+ must be able to compile the penstock_wkv_fwd kernel for sm_12, got (.|\n)*impl='auto'"
    ):
        nvrtc.compiled(Configuration("forward", 32, FLOAT32, FLOAT32), "sm_12")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("gla", K=64, V=64), "it computes rwkv5 and rwkv6, this is gla"),
        (replace(RWKV6, dtype=FLOAT64), "it computes in float32, and the inputs are float64"),
        (replace(RWKV6, K=64), "its heads have K = V of 32, 64 or 128, these have K = 64 and V = 32"),
        (replace(RWKV6, K=48, V=48), "its heads have K = V of 32, 64 or 128, these have K = 48 and V = 48"),
        (RWKV6, "its tensors are on cpu, it works on an NVIDIA GPU"),
    ],
    ids=str,
)
def test_refusals(case, reason):
    assert CUDA.refuses(problem_of(case, draw(case)), "forward") == reason


def test_tokens_too_far_apart_are_refused():
    case = replace(RWKV6, T=1, B=1, H=1)
    tensors = draw(case)
    far = tensors["q"].as_strided((1, 1, 1, 32), (1, 1 << 31, 32, 1))
    reason = CUDA.refuses(problem_of(case, tensors | {"q": far}), "forward")
    assert reason == f"it takes less than 2^30 tokens less than 2^31 elements apart, these are 1 tokens {1 << 31} elements apart"


@pytest.mark.parametrize(
    ("shape", "mode", "reason"),
    [
        ("1,54,32,64", "forward", None),
        ("1,256,32,64", "forward", None),
        ("4,9,8,64", "forward", None),
        ("1,54,32,64", "backward", "the Triton kernels are faster backward and in place"),
        ("1,1,32,64", "advance", "the Triton kernels are faster backward and in place"),
        ("1,8,32,64", "forward", "faster than the Triton kernels from 9 to 256 tokens, these are 8"),
        ("1,257,32,64", "forward", "faster than the Triton kernels from 9 to 256 tokens, these are 257"),
        ("2,54,32,64", "forward", "faster than the Triton kernels where each block of threads has a multiprocessor, these are 256 for 132"),
    ],
)
def test_auto_takes_cuda_where_it_is_faster(shape, mode, reason, monkeypatch):
    problem = without_memory("rwkv6", Shape.parse(shape), BFLOAT16).problem()
    monkeypatch.setattr(Target, "of", lambda device: Target("sm_90", 132, 227 << 10))
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    assert CUDA.avoids(problem, mode) == reason
    monkeypatch.setattr(cuda, "unavailable", lambda: "Triton is not installed")
    assert CUDA.avoids(problem, mode) is None


def test_cuda_by_name_raises_without_a_gpu():
    case = replace(RWKV6, T=3)
    if CUDA.available() is not None:
        tensors = {name: x for name, x in zip(("r", "k", "v", "w", "u"), draw(case).values())}
        with pytest.raises(
            ps.ImplementationRefused, match=r"^rwkv6: impl must be one that takes this call, got 'cuda': .*Use impl='auto'\.$"
        ):
            ps.rwkv6(**tensors, impl="cuda")
