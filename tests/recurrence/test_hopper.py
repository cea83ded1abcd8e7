"""Which problems the kernels for Hopper are planned for. Plans need no GPU."""

import itertools
import math

import pytest
import torch

from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target
from penstock.recurrence.operators import RECURRENCE
from penstock.recurrence.triton import plan
from penstock.recurrence.triton.forms import sm90
from penstock.recurrence.triton.table import KernelConfig, Key
from penstock.tokens.shape import Shape
from penstock.tune.passes import without_memory

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
H200 = Target("sm_90", 132, 232448)

pytestmark = pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels")


def problem_of(variant, shape, dtype=BFLOAT16):
    return without_memory(variant, Shape.parse(shape), dtype).problem()


def kernels_of(made):
    return [launch.kernel.fn.__module__.partition(".triton.")[2].removeprefix("portable.") for launch in made.launches]


def gla(q, k, v, g, reverse=False):
    return RECURRENCE.checked("gla", (q, k, v, g, None, None, None), (None, reverse, True))


def planned(problem, target=H200, keep=False):
    """The plan of a forward pass, for the sizes of the problem."""
    return plan.chunk_forward_plan(problem, target, keep).at(problem.sizes)


def forward(problem, target=H200):
    return kernels_of(planned(problem, target))


def backward(problem, target=H200, states=None):
    return kernels_of(plan.chunk_backward_plan(problem, problem.v, None, target, states))


@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_launches_of_hopper_and_plain_kernels(variant, size, dtype):
    """In float16 and float32 states between chunks are float32. Heads of 128 of float32 are two blocks of 64 key channels."""
    problem = problem_of(variant, f"8,2048,32,{size}", dtype)
    blocks, states, last = [], "sm90.segments", ["sm90.channel_backward"]
    if dtype == FLOAT32:
        states, blocks, last = "segments", ["blocks"] * (size > 64), ["sm90.channel_backward_float32", *["values"] * (size > 64)]
    assert forward(problem) == ["sm90.channel_forward", *blocks]
    assert backward(problem) == [states, states, *last]
    made = planned(problem, keep=True)
    shape, stored = made.memory["chunk_states"]
    assert stored == (BFLOAT16 if dtype == BFLOAT16 else FLOAT32)
    kept = torch.empty(*shape, dtype=stored, device="meta")
    assert kept.shape == (8 * 2048 // sm90.C, 32, size, size)
    assert backward(problem, states=kept) == [states, *last]


@pytest.mark.parametrize("shape", ["8,2048,32,64", "8,2048,4,256,512"])
def test_strides_of_decays_that_are_constants_of_kernels_fit_32_bits(shape):
    """Else plain kernels run, whose strides are numbers."""
    problem = problem_of("gla", shape)
    B, T, H, K = problem.g.shape
    far = problem.g.as_strided((B, T, H, K), (T * 2**25, 2**25, K, 1))
    problem = problem.with_tensors({"g": far})
    assert backward(problem)[-2:] == ["chunk_backward"] * 2
    assert "sm90.channel_forward" in forward(problem)
    assert all(launch.wide for launch in plan.chunk_backward_plan(problem, problem.v, None, H200).launches[-2:])


@pytest.mark.parametrize(("size", "blocks", "values"), [("256,64", 4, 1), ("64,512", 1, 8), ("192,128", 3, 2)])
def test_blocks_of_float32(size, blocks, values):
    """A head of up to 256 key channels is blocks of 64; another launch computes dv unless there is one block of keys and of values."""
    problem = problem_of("gla", f"8,2048,32,{size}", FLOAT32)
    made = planned(problem)
    assert kernels_of(made) == ["sm90.channel_forward", *["blocks"] * (blocks > 1)]
    assert made.launches[0].grid == 8 * 32 * blocks * values
    found = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert kernels_of(found)[-2:] == ["sm90.channel_backward_float32", "values"]
    assert found.launches[-2].grid == 8 * 32 * 32 * blocks
    assert found.memory["weights"] == ((8 * 32, 32, blocks, 64, 64), FLOAT32)


def test_float32_segments_fill_each_multiprocessor_once():
    """One program fits on a multiprocessor, and blocks of channels have programs of their own."""
    assert forward(problem_of("gla", "4,2048,16,128", FLOAT32)) == ["sm90.channel_forward", "blocks"]
    assert forward(problem_of("gla", "1,2048,16,128", FLOAT32))[:2] == ["segments", "segments"]


@pytest.mark.parametrize(("shape", "most"), [("8,2048,32,64", 473), ("4,2048,16,128", 270)])
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_memory_of_a_training_step(variant, shape, most):
    """MB of output, kept states and all memory of the backward pass; gradients of states have none, except those of shorter chunks."""
    problem = problem_of(variant, shape)
    memory = planned(problem, keep=True).memory
    states = torch.empty(*memory["chunk_states"][0], dtype=BFLOAT16, device="meta")
    made = plan.chunk_backward_plan(problem, problem.v, None, H200, states).at(problem.sizes)
    assert made.memory["d_chunk_states"][0] == (0, *problem.state_shape[1:])
    taken = [memory["output"], memory["chunk_states"], *made.memory.values()]
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in taken) <= most * 10**6


@pytest.mark.parametrize("T", [129, 2047])
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_gradients_of_states_of_shorter_chunks_have_memory(variant, T):
    problem = problem_of(variant, f"4,{T},16,64")
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert made.memory["d_chunk_states"][0] == problem.state_shape


def test_whole_packed_sequences_have_no_more_programs_than_there_are():
    """One for each block of a sequence's state, also if the tokens are a multiple of the chunk: offsets end with the last sequence."""
    q, k, v, g = (torch.empty(1, 8192, 128, 64, dtype=BFLOAT16, device="meta") for _ in range(4))
    problem = RECURRENCE.checked("gla", (q, k, v, g, None, torch.empty(4, dtype=torch.int64, device="meta"), None), (None, False, True))
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert kernels_of(made)[:2] == ["sm90.segments"] * 2
    assert [one.grid for one in made.launches[:2]] == [3 * 128] * 2
    made = plan.chunk_backward_plan(problem, problem.v, None, H200._replace(arch="sm_80")).at(problem.sizes)
    assert kernels_of(made)[:2] == ["segments"] * 2
    assert [one.grid for one in made.launches[:2]] == [3 * 128 * 2] * 2


def test_packed_sequences_may_have_shorter_chunks():
    """The host does not know their lengths."""
    q, k, v, g = (torch.empty(1, 128, 2, 64, dtype=BFLOAT16, device="meta") for _ in range(4))
    problem = RECURRENCE.checked("gla", (q, k, v, g, None, torch.empty(3, dtype=torch.int64, device="meta"), None), (None, False, True))
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert made.memory["d_chunk_states"][0] == (2, 2, 64, 64)


def test_walks_without_decays_per_channel():
    """Heads of 64 value channels and 64 or 128 key channels, if there are enough sequences and heads."""
    plain = ["segments", "segments", "chunk_backward"]
    for variant, K in itertools.product(("linear_attention", "retention", "simple_gla"), (64, 128)):
        walks = ["segments", "sm90.scalar_backward"]
        problem = problem_of(variant, f"8,2048,32,{K},64")
        assert forward(problem) == ["sm90.scalar_forward"]
        states = torch.empty(*planned(problem, keep=True).memory["chunk_states"][0], dtype=BFLOAT16, device="meta")
        assert states.shape == (8 * 2048 // sm90.C, 32, K, 64)
        assert backward(problem) == walks
        assert backward(problem, states=states) == walks[1:]
        assert "d_chunk_states" not in plan.chunk_backward_plan(problem, problem.v, None, H200).memory
        assert forward(problem, H200._replace(arch="sm_80")) == ["chunk_forward"]
        assert backward(problem, H200._replace(arch="sm_80"))[-1] == "chunk_backward"
    assert forward(problem_of("simple_gla", "4,8192,33,64")) == ["sm90.scalar_forward"]  # no segments
    x = problem_of("simple_gla", "8,2048,32,64")
    for problem in (
        problem_of("simple_gla", "8,2048,32,64", torch.float16),
        problem_of("simple_gla", "8,2048,32,128"),
        problem_of("simple_gla", "8,2048,32,64,128"),
        problem_of("simple_gla", "8,2048,32,48"),
        RECURRENCE.checked("simple_gla", (x.q, x.k, x.v, x.g, None, None, None), (None, True, True)),
    ):
        assert forward(problem) == ["chunk_forward"]
        assert backward(problem) == plain
    assert forward(problem_of("simple_gla", "1,2048,64,128,64")) == ["sm90.scalar_forward"]
    for few in ("2,2048,32,64", "8,64,32,64", "1,2048,63,128,64"):
        problem = problem_of("simple_gla", few)
        assert forward(problem)[-1] == "chunk_forward"
        assert backward(problem)[-1] == "chunk_backward"
    expanded = x.v[:, :1].expand_as(x.v)
    assert kernels_of(plan.chunk_backward_plan(x, expanded, None, H200)) == plain
    assert forward(RECURRENCE.checked("simple_gla", (x.q, x.k, expanded, x.g, None, None, None), (None, False, True))) == ["chunk_forward"]


@pytest.mark.parametrize("K", [64, 128])
def test_walks_of_heads_that_share_queries_and_keys(K):
    """Both are copied from one head. Other tensors with strides of 0 are copied by no hardware."""
    x = problem_of("simple_gla", f"2,4096,80,{K},64")

    def shared(**other):
        tensors = {name: getattr(x, name) for name in "qkvg"} | other
        return RECURRENCE.checked("simple_gla", (*tensors.values(), None, None, None), (None, False, True))

    one = x.q[:, :, :1].expand_as(x.q)
    for problem in (shared(q=one, k=one), shared(k=one), shared(q=one)):
        assert forward(problem) == ["sm90.scalar_forward"]
        assert backward(problem)[-1].startswith("sm90.scalar_backward")
        numbers = [dict(zip(made.kernel.arg_names[len(made.tensors) :], made.numbers)) for made in planned(problem).launches]
        assert [numbers[0][name] for name in ("q_h", "k_h")] == [problem.q.stride(2), problem.k.stride(2)]
    for problem in (shared(v=x.v[:, :, :1].expand_as(x.v)), shared(q=x.q[:, :1].expand_as(x.q)), shared(k=x.k[:1].expand_as(x.k))):
        assert forward(problem)[-1] == "chunk_forward"
        assert backward(problem)[-1] == "chunk_backward"


@pytest.mark.parametrize(
    ("problem", "target"),
    [
        (problem_of("gla", "8,2048,32,96", FLOAT32), H200),
        (problem_of("gla", "8,2048,32,64", FLOAT32), H200._replace(arch="sm_80")),
        (problem_of("gla", "8,2048,32,64"), H200._replace(arch="sm_80")),
        (problem_of("gla", "8,2048,32,64"), H200._replace(arch="sm_100")),
        (problem_of("gla", "8,2048,32,48"), H200),
        (problem_of("gla", "8,2048,32,64,100"), H200),
        (problem_of("simple_gla", "8,2048,32,64"), H200),
    ],
    ids=["float32 odd K", "float32 sm_80", "sm_80", "sm_100", "odd K", "odd V", "scalar decay"],
)
def test_other_problems_take_the_plain_kernels(problem, target):
    assert not {"sm90.channel_forward", "sm90.channel_backward", "sm90.channel_backward_float32"} & {
        *forward(problem, target),
        *backward(problem, target),
    }


@pytest.mark.parametrize("size", ["64,128", "128,64"])
def test_K_and_V_may_differ(size):
    """Backward, V is a multiple of K; dv is a launch of its own."""
    problem = problem_of("gla", f"8,2048,32,{size}")
    made = planned(problem, keep=True)
    K, V = problem.sizes["K"], problem.sizes["V"]
    assert kernels_of(made) == ["sm90.channel_forward"]
    assert made.launches[0].grid == 8 * 32 * V // 64
    assert ("chunk_states" in made.memory) is (V % K == 0)  # the plain backward kernel has chunks of 32 there
    if "chunk_states" in made.memory:
        states = torch.empty(*made.memory["chunk_states"][0], dtype=BFLOAT16, device="meta")
        assert states.shape == (8 * 2048 // 64, 32, K, V)
        assert backward(problem, states=states) == ["sm90.segments", "sm90.channel_backward", "values"]


@pytest.mark.parametrize(("shape", "values"), [("8,2048,4,256,512", 128), ("4,2048,4,256,256", 64), ("8,2048,32,256,192", 64)])
def test_chunks_of_heads_of_256_are_walked(shape, values):
    """The walk has fewer programs than there are multiprocessors, or one for 128 value channels, if these divide V."""
    problem = problem_of("gla", shape)
    made = planned(problem, keep=True)
    B, H, V = (problem.sizes[name] for name in "BHV")
    assert kernels_of(made) == ["sm90.channel_weights", "sm90.channel_walk"]
    assert [one.grid for one in made.launches] == [B * 2048 // 64 * H, B * H * V // values]
    states = torch.empty(*made.memory["chunk_states"][0], dtype=BFLOAT16, device="meta")
    rest = (
        ["sm90.channel_weights", "sm90.channel_walk", "sm90.channel_backward"]
        if V % 128 == 0
        else ["segments", "chunk_backward", "chunk_backward"]
    )
    assert backward(problem, states=states) == rest


def test_walks_have_segments_where_programs_are_few():
    problem = problem_of("gla", "1,8192,4,256,512")
    made = planned(problem, keep=True)
    assert kernels_of(made) == ["segments", "segments", "sm90.channel_weights", "sm90.channel_walk"]
    assert made.launches[-1].grid == 4 * 4 * 8
    assert backward(problem) == [*["segments"] * 5, "sm90.channel_weights", "sm90.channel_walk", "sm90.channel_backward"]


def test_tensors_must_be_matrices_of_aligned_rows():
    given = problem_of("gla", "2,256,4,64")
    for change in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        other = gla(change(given.q), given.k, given.v, given.g)
        assert "sm90.channel_forward" not in forward(other)
        assert "sm90.channel_backward" not in backward(other)
    for expanded in (given.k[:, :, :1].expand(2, 256, 4, 64), given.k[:1].expand(2, 256, 4, 64), given.k[:, :1].expand(2, 256, 4, 64)):
        other = gla(given.q, expanded, given.v, given.g)
        assert "sm90.channel_forward" not in forward(other)
        assert "sm90.channel_backward" not in kernels_of(plan.chunk_backward_plan(given, expanded, None, H200))
    joined = torch.empty(2, 256, 3 * 4 * 64, dtype=BFLOAT16, device="meta").split(256, 2)
    q, k, v = (x.view(2, 256, 4, 64) for x in joined)
    assert "sm90.channel_forward" in forward(gla(q, k, v, given.g))
    backwards = gla(given.q, given.k, given.v, given.g, reverse=True)
    assert "sm90.channel_forward" not in forward(backwards)


def test_constant_decays_take_hopper_kernels_and_single_chunks_the_plain_backward_kernel():
    problem = problem_of("rwkv5", "8,2048,32,64")
    assert "sm90.channel_forward" in forward(problem)
    assert "sm90.channel_backward" in backward(problem)
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert made.memory["dg"] == made.memory["du"] == ((8 * 2048 // sm90.C, 32, 64), FLOAT32)
    assert "sm90.channel_backward" not in backward(problem_of("gla", "8,64,32,64"))


@pytest.mark.parametrize("size", ["64", "256,512"])
def test_kernels_are_not_specialized_for_counts(size):
    """All calls that share a plan run the compiled kernel: no count of the first one becomes a constant, and all fit 32 bits."""
    problem = problem_of("gla", f"1,131072,64,{size}")
    made = plan.chunk_forward_plan(problem, H200, keep=True)
    for one in (*made.launches, *plan.chunk_backward_plan(problem, problem.v, None, H200).launches):
        options = getattr(one.kernel, "kwargs", None) or vars(one.kernel)  # under the interpreter, or not
        general = options["do_not_specialize"] or ()
        names = one.kernel.arg_names[len(one.tensors) :]
        counts = {name: number(problem.sizes) for name, number in zip(names, one.numbers) if callable(number)}
        assert counts.keys() <= set(general), one.kernel
        assert all(count < 1 << 31 for count in counts.values())


def test_a_table_disables_hopper_kernels():
    table = {Key(kernel, "channel", "updated", "bf16", 64, 64): KernelConfig(4, C=64) for kernel in ("forward", "backward")}
    problem = problem_of("gla", "8,2048,32,64")
    assert "sm90.channel_forward" not in forward(problem, H200._replace(table=table))
    assert "sm90.channel_backward" not in backward(problem, H200._replace(table=table))


def test_segments_keep_states_and_single_chunks_do_not():
    made = planned(problem_of("gla", "1,65536,32,64"), keep=True)
    assert kernels_of(made)[:3] == ["sm90.segments", "segments", "sm90.channel_forward"]
    assert made.memory["chunk_states"][0] == (1024, 32, 64, 64)
    made = planned(problem_of("gla", "8,64,32,64"), keep=True)
    assert kernels_of(made)[0] == "sm90.channel_forward"
    assert "chunk_states" not in made.memory


@pytest.mark.parametrize(("shape", "segments"), [("1,8192,32,64", 8), ("1,8192,64,64", 4), ("1,8192,16,128", 4)])
def test_number_of_segments(shape, segments):
    """As many as fill the multiprocessors; the forward kernel has a program for each head, segment and 64 value channels.

    A program for sums has up to 128 value channels, so at 128 segments are halves. In both passes.
    """
    problem = problem_of("gla", shape)
    K, H = problem.sizes["K"], problem.sizes["H"]
    parts, state = K // 64, (segments, H, K, K)
    made, found = planned(problem), plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert kernels_of(made) == ["sm90.segments", "segments", "sm90.channel_forward"]
    assert kernels_of(found) == ["sm90.segments", "segments", "sm90.segments"] * 2 + ["sm90.channel_backward"]
    assert [one.grid for one in made.launches] == [segments * parts * H, H * K // 8 * parts, segments * parts * H]
    assert [one.grid for one in found.launches[:3]] == [one.grid for one in made.launches]
    for one in (made, found):
        assert one.memory["segment_sums"][0] == (segments * parts, H, K, K)
        assert one.memory.get("segment_states", ((segments, H, K, K),))[0] == state


@pytest.mark.parametrize("shape", ["2,16384,16,128", "2,8192,64,64"])
def test_two_segments_of_a_backward_pass_are_one(shape):
    """They are read twice, which takes as long as one walk of the whole."""
    assert backward(problem_of("gla", shape)) == ["sm90.segments", "sm90.segments", "sm90.channel_backward"]


@pytest.mark.parametrize(("shape", "spans"), [("1,2048,32,64", 8), ("1,4096,32,64", 8), ("1,2048,16,128", 8), ("4,512,32,64", 8)])
def test_sums_of_all_chunks_are_scanned_if_they_are_small(shape, spans):
    """A program computes the sums of the chunks of a span. The sums of both directions share memory."""
    problem = problem_of("rwkv6", shape)
    chunks, H, K = problem.sizes["B"] * problem.sizes["T"] // 64, problem.sizes["H"], problem.sizes["K"]
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert kernels_of(made) == ["sm90.segments", "segments"] * 2 + ["sm90.channel_backward"]
    assert [one.grid for one in made.launches[:2]] == [spans * H, problem.sizes["N"] * H * K // 8 * (K // 64)]
    assert made.memory["chunk_sums"][0] == (chunks, H, K, K)
    assert made.memory["d_chunk_states"][0] == (0, H, K, K)


def test_plain_kernels_scan_sums_of_all_chunks():
    problem = problem_of("rwkv6", "1,1024,32,64")
    made = plan.chunk_backward_plan(problem, problem.v, None, H200._replace(arch="sm_80")).at(problem.sizes)
    assert kernels_of(made) == ["segments"] * 4 + ["chunk_backward"] * 2
    assert made.memory["chunk_sums"][0] == (32, 32, 64, 64)  # chunks have 32 tokens there
    assert [one.grid for one in made.launches[:2]] == [32 * 32 * 2, 32 * 8]


def test_scans_of_float32_states_are_in_place():
    problem = problem_of("gla", "1,2048,32,64", FLOAT16)
    made = plan.chunk_backward_plan(problem, problem.v, None, H200).at(problem.sizes)
    assert kernels_of(made) == ["sm90.segments", "segments"] * 2 + ["sm90.channel_backward"]
    assert {name for name in made.memory if "chunk" in name} == {"chunk_sums", "chunk_decays", "d_chunk_sums", "d_chunk_decays"}
    assert made.launches[-1].tensors[4:6] == ("chunk_sums", "d_chunk_sums")


def test_launches_that_begin_early():
    """The scan of sums by a Hopper kernel, and the forward kernel after it. No other launch is known to wait for the one ahead."""
    for variant, shape, early in (("gla", "1,2048,32,64", [False, True, True]), ("retention", "1,2048,32,64", [False, False, False])):
        made = planned(problem_of(variant, shape))
        assert [("launch_pdl", True) in one.options for one in made.launches] == early
        for one in made.launches[1:]:
            constants = dict(zip(one.kernel.arg_names[-len(one.constants) :], one.constants))
            assert constants.get("EARLY", False) is (("launch_pdl", True) in one.options)
    problem = problem_of("gla", "1,2048,32,64")
    made = plan.chunk_backward_plan(problem, problem.v, None, H200)
    assert [("launch_pdl", True) in one.options for one in made.launches] == [False, True, False, True, False]
    assert all(("launch_pdl", True) not in one.options for one in planned(problem, H200._replace(arch="sm_80")).launches)


def test_many_short_sequences_keep_no_states():
    given = problem_of("gla", "1,4000,4,64")
    for length, keeps in ((20, False), (1000, True)):
        offsets = torch.empty(4000 // length + 1, dtype=torch.int32, device="meta")
        packed = RECURRENCE.checked("gla", (given.q, given.k, given.v, given.g, None, offsets, None), (None, False, True))
        assert ("chunk_states" in planned(packed, H200._replace(arch="sm_80"), keep=True).memory) is keeps


BUFFERS = [((2, 128), (128, 100, 65)), ((4, 1024), (1024, 700, 513)), ((1, 300), (300, 257))]
"""Sizes B and T of tensors, and numbers of tokens of slices whose calls have equal counts."""


@pytest.mark.parametrize(("sizes", "tokens"), BUFFERS)
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_calls_that_share_plans_have_equal_plans(variant, sizes, tokens):
    """Slices in time have equal strides. Only the whole tensors are matrices [B T,H K], which the Hopper kernels need."""
    given = problem_of(variant, f"{sizes[0]},{sizes[1]},4,64")

    def sliced(T):
        tensors = [x if x is None or x.dim() < 4 else x[:, :T] for x in given.tensors]
        return RECURRENCE.checked(variant, tensors, (None, False, True))

    problems = [sliced(T) for T in tokens]
    assert "sm90.channel_forward" in forward(problems[0])
    for one in problems:
        for other in problems:
            if one.seen.kind is other.seen.kind:
                assert plan.chunk_forward_plan(one, H200, True).at(other.sizes) == planned(other, keep=True)
    assert len({id(one.seen.kind) for one in problems}) == min(sizes[0], 2)
