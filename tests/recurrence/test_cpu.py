"""The native kernels: they run here, with every instruction set of this CPU that they were compiled for."""

import ctypes
from dataclasses import replace

import pytest
import torch
from cases import Case, check_against, draw, oracle, problem_of
from contract import measured

from penstock import cpu as native
from penstock.recurrence import cpu
from penstock.recurrence.functional import advance
from penstock.recurrence.variants import VARIANTS

CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
HERE = torch.backends.cpu.get_cpu_capability()
RUN_HERE = CAPABILITIES[: CAPABILITIES.index(HERE) + 1] if HERE in CAPABILITIES else [HERE]
SHAPES = [
    replace(Case(variant, K=20, V=36), **options)
    for variant in VARIANTS
    for options in ({"lengths": (0, 5, 64, 1)}, {"T": 33, "K": 100, "V": 7, "strided": True}, {"dtype": torch.bfloat16, "reverse": True})
]


@pytest.fixture
def capability(request, monkeypatch):
    """Torch reports this capability."""
    native._function.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    yield request.param
    native._function.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_kernels_run_here(variant, dtype):
    """Else a library that does not load would turn all contract tests of ``cpu`` into refusals."""
    case = Case(variant, dtype=dtype)
    problem = problem_of(case, draw(case))
    assert [cpu.IMPLEMENTATION.available(), *(cpu.refuses(problem, mode) for mode in ("forward", "backward", "advance"))] == [None] * 4


@pytest.mark.parametrize("capability", RUN_HERE, indirect=True)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_every_instruction_set_equals_the_oracle(case, capability):
    check_against(measured(case, "cpu"), oracle(case), case.dtype)


@pytest.mark.parametrize("capability", RUN_HERE, indirect=True)
def test_instruction_set_is_the_best_that_torch_reports(capability):
    name = {"DEFAULT": "baseline", "AVX2": "avx2", "AVX512": "avx512"}.get(capability, "baseline")
    assert native._function("forward") is getattr(native._library(), f"penstock_forward_{name}")


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_and_slots_live_as_long_as_the_call(offsets_dtype, slots_dtype, monkeypatch):
    """Those of 32 bits are read from copies. Other tensors take the memory of a copy that nothing holds."""
    offsets, slots, run, ran = [0, 0, 3, 4, 9], [2, 3, 1, 0], cpu.run, []

    def values(address, count):
        return list((ctypes.c_int64 * count).from_address(address))

    def checked(name, call, work):
        others = [torch.full((size,), -1) for size in (4, 5) for _ in range(8)]
        assert values(call.cu_seqlens, 5) == offsets
        assert values(call.slots, 4) == slots
        ran.append(len(others))
        run(name, call, work)

    monkeypatch.setattr(cpu, "run", checked)
    q, k, v = (torch.randn(1, 9, 2, size) for size in (4, 4, 3))
    given = torch.tensor(offsets, dtype=offsets_dtype), torch.tensor(slots, dtype=slots_dtype)
    advance("linear_attention", q, k, v, state=torch.zeros(4, 2, 4, 3), cu_seqlens=given[0], slots=given[1], impl="cpu")
    assert ran
