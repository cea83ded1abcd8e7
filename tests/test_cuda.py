"""The CUDA kernels without a GPU: compiled for three architectures, emulated and held to the oracle, kept on disk, refused with reasons."""

import re
from dataclasses import replace
from functools import partial

import emulated
import pytest
import torch
from cases import SHARED, Case, Wanted, check_against, draw, oracle, problem_of, upstream
from test_contract import check_near_underflow, long_cases

import penstock as ps
from penstock.bench import ladder
from penstock.bench.cases import Shape, inputs
from penstock.bench.oracle import error, exact_forward
from penstock.bench.passes import without_memory
from penstock.dispatch import IMPLEMENTATIONS
from penstock.errors import PenstockError
from penstock.kernels import cuda, reference
from penstock.kernels.cuda import HEADS, compile, launch
from penstock.kernels.cuda.compile import Configuration
from penstock.problem import Step

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CUDA = next(one for one in IMPLEMENTATIONS if one.name == "cuda")
RWKV6, RWKV5 = (Case(variant, H=2, K=32, V=32) for variant in ("rwkv6", "rwkv5"))
LENGTHS = (0, 5, 40, 0, 1, 33, 0)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(launch, "run", emulated.run)


def results(case: Case) -> dict[str, torch.Tensor]:
    """Output, final state and all gradients, straight from the implementation."""
    tensors = draw(case)
    problem = problem_of(case, tensors)
    output, final_state = CUDA.forward(problem)
    grads = CUDA.backward(problem, *upstream(case))
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


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_oracle(case):
    check_against(results(case), oracle(case), case.dtype)


@pytest.mark.parametrize("case", [case for variant in ("rwkv5", "rwkv6") for case in long_cases(variant)], ids=str)
def test_long_sequences_equal_the_oracle(case):
    case = replace(case, K=32, V=32)
    check_against(results(case), oracle(case), case.dtype)


@pytest.mark.parametrize("of", [RWKV6, RWKV5], ids=str)
def test_decay_gradients_near_underflow(of):
    check_near_underflow(replace(of, T=5, B=1, H=1), results)


@pytest.mark.parametrize("case", [replace(RWKV6, T=70), replace(RWKV5, lengths=LENGTHS), replace(RWKV6, T=20, K=128, V=128)], ids=str)
def test_threads_may_run_in_any_order(case, monkeypatch):
    """Where a barrier is missing, a thread reads before or after another has written, as the order has it."""
    found = results(case)
    monkeypatch.setattr(launch, "run", partial(emulated.run, backwards=True))
    for name, x in results(case).items():
        assert torch.equal(x, found[name]), name


def test_the_emulation_finds_a_missing_barrier(monkeypatch):
    """Else the test above could not fail."""
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
    found, wanted = CUDA.backward(problem, d_output, None), CUDA.backward(problem, d_output, torch.zeros_like(d_final_state))
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("slots", [None, [3, -1, 0]], ids=["all rows", "slots"])
@pytest.mark.parametrize("of", [RWKV6, RWKV5, replace(RWKV6, shared="BNH"), replace(RWKV6, shared="overlap")], ids=str)
def test_a_decode_step_updates_its_rows_in_place(of, slots, dtype):
    tensors = draw(replace(of, B=3, T=2, dtype=dtype))
    rows = torch.tensor([0, 1, 2] if slots is None else slots)
    pool = torch.randn(3 if slots is None else 5, of.H, 32, 32).to(dtype)
    exact = pool.double()
    arguments = [tensors[name] for name in ("q", "k", "v", "g", "u")]

    def step(state, *inputs):
        return Step.checked(*inputs, state, None if slots is None else rows, of.variant, None)

    wanted = reference.IMPLEMENTATION.step(step(exact, *(x.double() for x in arguments)))
    found = CUDA.step(step(pool, *arguments))
    exactly = {"output": wanted, "pool": exact}
    check_against({"output": found, "pool": pool}, {name: Wanted(x, float(x.norm())) for name, x in exactly.items()}, dtype)
    if slots is not None:
        assert not found[1].any()


def test_calls_of_one_signature_share_what_was_prepared(monkeypatch):
    """They differ in values and in where these lie; other strides are another signature."""
    monkeypatch.setattr(launch, "_prepared", {})
    case = replace(RWKV6, lengths=LENGTHS)
    d_output, d_final_state = upstream(case)
    tensors = draw(case)
    across = tensors["v"].transpose(1, 2).contiguous().transpose(1, 2)
    found = {}
    for name, v, prepared in (("first", tensors["v"], 2), ("negated", -tensors["v"], 2), ("across", across, 4), ("again", tensors["v"], 4)):
        problem = problem_of(case, tensors | {"v": v, "initial_state": torch.zeros_like(tensors["initial_state"])})
        found[name] = [*CUDA.forward(problem), *CUDA.backward(problem, d_output, d_final_state)]
        assert len(launch._prepared) == prepared
    for x, negated, *others in zip(*found.values()):
        assert all(torch.equal(x, other) for other in others)
        assert torch.equal(x.abs(), negated.abs())
    assert torch.equal(found["first"][0], -found["negated"][0])


def test_what_is_prepared_is_bounded(monkeypatch):
    monkeypatch.setattr(launch, "_prepared", {})
    monkeypatch.setattr(launch, "KEPT", 3)
    for T in range(1, 9):
        case = replace(RWKV6, T=T, B=1, H=1)
        CUDA.forward(problem_of(case, draw(case)))
        assert len(launch._prepared) <= 3


def configurations(head: int) -> list[Configuration]:
    """What calls of models need: decays in float32, and gradients of decays that are one for all tokens in float32."""
    found = [Configuration("forward", head, dtype, FLOAT32) for dtype in (BFLOAT16, FLOAT16, FLOAT32)]
    found += [Configuration("backward", head, BFLOAT16, FLOAT32), Configuration("backward", head, FLOAT32, FLOAT32, static=True)]
    odd = Configuration("forward", head, BFLOAT16, BFLOAT16, BFLOAT16, FLOAT16, FLOAT64, torch.int32)
    return [*found, odd, replace(odd, kernel="backward", tokens=FLOAT16, final_state=FLOAT32)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles_without_spills(arch, head):
    pytest.importorskip("cuda.core")
    told = {configuration: compile.compiled(configuration, arch)[1] for configuration in configurations(head)}
    spills = {one: re.findall(r"(\d+) bytes spill (?:stores|loads)", log) for one, log in told.items()}
    assert all(len(found) == 2 for found in spills.values()), next(iter(told.values()))
    assert not [one for one, found in spills.items() if found != ["0", "0"]]


def test_machine_code_is_kept_and_what_is_broken_is_compiled_anew(monkeypatch, tmp_path):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configuration = Configuration("forward", 32, FLOAT32, FLOAT32)
    code = compile.machine_code(configuration, "sm_90")
    path = compile.kept_at(configuration, "sm_90")
    kept = path.read_bytes()
    assert [one.name for one in path.parent.iterdir()] == [path.name]

    calls = []
    monkeypatch.setattr(compile, "compiled", lambda *given: calls.append(given) or (code, ""))
    assert compile.machine_code(configuration, "sm_90") == code
    assert not calls
    for broken in (b"", kept[:-1], kept[:40] + b"?" + kept[41:]):
        calls.clear()
        path.write_bytes(broken)
        assert compile.machine_code(configuration, "sm_90") == code
        assert len(calls) == 1
        assert path.read_bytes() == kept


def test_what_machine_code_depends_on_is_in_its_name(monkeypatch):
    pytest.importorskip("cuda.bindings")
    configuration = Configuration("forward", 32, FLOAT32, FLOAT32)
    names = {
        compile.kept_at(one, "sm_90") for one in (configuration, replace(configuration, head=64), replace(configuration, gate=FLOAT64))
    }
    names |= {compile.kept_at(configuration, "sm_80")}
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (99, 0))
    names |= {compile.kept_at(configuration, "sm_90")}
    monkeypatch.setattr(Configuration, "source", "another")
    names |= {compile.kept_at(configuration, "sm_90")}
    assert len(names) == 6


def test_a_folder_that_cannot_be_written_is_no_failure(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(compile, "compiled", lambda *given: (b"code", ""))
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 0))
    assert compile.machine_code(Configuration("forward", 32, FLOAT32, FLOAT32), "sm_90") == b"code"


def test_an_architecture_that_the_compiler_does_not_know():
    pytest.importorskip("cuda.core")
    with pytest.raises(
        PenstockError, match=r"^cuda: NVRTC \d+\.\d+ must be able to compile the forward kernel for sm_12, got (.|\n)*impl='auto'"
    ):
        compile.compiled(Configuration("forward", 32, FLOAT32, FLOAT32), "sm_12")


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
        ("4,8,8,64", "forward", None),
        ("1,54,32,64", "backward", "the Triton kernels are faster backward and in decode steps"),
        ("1,1,32,64", "step", "the Triton kernels are faster backward and in decode steps"),
        ("1,7,32,64", "forward", "faster than the Triton kernels from 8 to 256 tokens, these are 7"),
        ("1,257,32,64", "forward", "faster than the Triton kernels from 8 to 256 tokens, these are 257"),
        ("2,54,32,64", "forward", "faster than the Triton kernels where each block of threads has a multiprocessor, these are 256 for 132"),
    ],
)
def test_auto_takes_it_where_it_is_faster(shape, mode, reason, monkeypatch):
    problem = without_memory("rwkv6", Shape.parse(shape), BFLOAT16).problem()
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda.triton, "available", lambda: None)
    assert CUDA.avoids(problem, mode) == reason
    monkeypatch.setattr(cuda.triton, "available", lambda: "Triton is not installed")
    assert CUDA.avoids(problem, mode) is None


def test_it_can_be_named_only_where_it_is_available():
    case = replace(RWKV6, T=3)
    if CUDA.available() is not None:
        tensors = {name: x for name, x in zip(("r", "k", "v", "w", "u"), draw(case).values())}
        with pytest.raises(
            ps.ImplementationRefused, match=r"^rwkv6: impl must be one that takes this call, got 'cuda': .*Use impl='auto'\.$"
        ):
            ps.rwkv6(**tensors, impl="cuda")


@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_of_the_ladder_equals_the_oracle(name):
    """Also where the last block of threads has work for some of them only."""
    x = inputs("rwkv6", Shape(3, 20, 1, 32, 32), FLOAT32, "cpu")
    found = ladder.Rung(name, 32).forward(x, x.g.exp())
    assert error(found, exact_forward(x)[0]) < 1e-6


@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_compiles(name):
    pytest.importorskip("cuda.core")
    compile.compiled(ladder.Rung(name, 64), "sm_90")


def test_a_rung_is_timed_on_a_gpu_only_and_on_what_it_takes(monkeypatch):
    x = inputs("rwkv6", Shape(1, 2, 1, 32, 32), FLOAT32, "cpu")
    with pytest.raises(ps.ImplementationRefused, match=r"^bench: rung-wide cannot be timed here: .+\.$"):
        ladder.rung("rung-wide", x, "fwd")
    with pytest.raises(ps.InvalidArgument) as broken:
        ladder.rung("rung-wide", inputs("gla", Shape(1, 2, 1, 6, 4), BFLOAT16, "cpu"), "decode")
    assert [line.partition(",")[0] for line in str(broken.value).splitlines()] == [
        "bench: rung-wide: variant must be rwkv6",
        "bench: rung-wide: mode must be fwd",
        "bench: rung-wide: dtype must be float32",
        "bench: rung-wide: shape must be one of equal K and V",
    ]
