"""Softmax attention over pages: the kernels and plain PyTorch against rows of a cache, and bits that depend on the row alone."""

import pytest
import torch

from penstock.errors import DtypeError, RangeError
from penstock.layers import SoftmaxAttentionConfig
from penstock.layers.attention_pages import PAGE, PagedAttentionState, attend_pages
from penstock.layers.sequences import Sequences

C, ROWS, MOST = 24, 5, 11
CONFIGS = {
    "plain": SoftmaxAttentionConfig(4, 2, max_length=MOST * PAGE),
    "window": SoftmaxAttentionConfig(3, head_dim=6, window_size=70, qk_norm=True, qkv_bias=True, max_length=MOST * PAGE),
    "one head of keys": SoftmaxAttentionConfig(4, 1, rope_theta=None, max_length=MOST * PAGE),
}
FORMS = ("pages", "by_sequence")

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of undefined outputs of skipped rows."""


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def paged(mixer, rows=ROWS, dtype=torch.float32):
    """A pool whose pages hold other values before they are written, and are in no order. Its tensors are parts of rows, as in an engine."""
    state = mixer.initial_state(rows, torch.empty(0, dtype=dtype)).paged(1 + rows * MOST, MOST)
    state.pages.copy_(1 + torch.randperm(rows * MOST, generator=torch.Generator().manual_seed(1)).view(rows, MOST))
    keys, values = torch.stack([state.keys, state.values], 1).fill_(float("nan")).unbind(1)
    return state._replace(keys=keys, values=values, length=torch.stack([state.length, state.length + 9], 1)[:, 0])


@pytest.fixture(params=FORMS)
def form(request):
    """The kernels, under the interpreter, or plain PyTorch."""
    if request.param == "pages":
        request.getfixturevalue("kernels_on_a_cpu")
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_rows_in_pages_equal_rows_of_a_cache(name, form):
    """Rows of one token, and packed pieces of several rows, some of them skipped or empty."""
    torch.manual_seed(0)
    mixer = CONFIGS[name].build(C)
    rows, pages = mixer.initial_state(ROWS, torch.empty(0)), paged(mixer)
    calls = [([0, 60, 60, 70, 75], [3, 0, -1, 1]), (None, [1, 3, -1, 4]), ([0, 3, 69, 70], [4, 3, 1]), (None, [3, 2, 0, 1])]
    for n, (ends, slots) in enumerate(calls):
        x = random(*((len(slots), 1) if ends is None else (1, ends[-1])), C, seed=n)
        options = {"cu_seqlens": None if ends is None else torch.tensor(ends), "slots": torch.tensor(slots)}
        wanted, found = (mixer.advance(x, state, **options) for state in (rows, pages))
        for place, slot in enumerate(slots):
            part = (place,) if ends is None else (0, slice(ends[place], ends[place + 1]))
            if slot >= 0:
                torch.testing.assert_close(found[part], wanted[part], rtol=1e-4, atol=1e-4)
        assert torch.equal(rows.length, pages.length)
    for row, length in enumerate(rows.length.tolist()):
        where = pages.pages[row].long()
        for one, other in ((rows.keys, pages.keys), (rows.values, pages.values)):
            torch.testing.assert_close(other[where].flatten(0, 1)[:length], one[row, :length])
            assert other[where].flatten(0, 1)[length:].isnan().all()
    assert pages.keys[0].isnan().all()


def attended(lengths, ends, slots, *, q, k, v, window, seed=3):
    """The outputs [T,H,D] of a call on new pages, whose earlier tokens are the same in every call."""
    G, D = k.shape[2:]
    state = PagedAttentionState(
        random(1 + ROWS * MOST, PAGE, G, D, seed=seed, dtype=k.dtype), random(1 + ROWS * MOST, PAGE, G, D, seed=seed + 1, dtype=k.dtype),
        1 + torch.arange(ROWS * MOST, dtype=torch.int32).view(ROWS, MOST), torch.tensor(lengths),
    )  # fmt: skip
    sequences = Sequences(q, None if ends is None else torch.tensor(ends), torch.tensor(slots), in_place=True)
    return attend_pages(q, k, v, state, sequences, window).flatten(0, 1)


@pytest.mark.parametrize("window", [None, 90])
@torch.no_grad()
def test_bits_of_a_token_do_not_depend_on_its_piece_or_on_other_rows(window, form):
    """The tokens of a piece of 7, beside others and in pieces of 1, over several splits."""
    before = 508
    q, k, v = random(1, 7, 4, 8), random(1, 7, 2, 8, seed=1), random(1, 7, 2, 8, seed=2)
    lengths = [0, 640, before, 5, 0]
    wanted = attended(lengths, [0, 7], [2], q=q, k=k, v=v, window=window)
    others = [torch.cat([random(1, 3, *x.shape[2:], seed=9), x, random(1, 20, *x.shape[2:], seed=8)], 1) for x in (q, k, v)]
    beside = dict(zip("qkv", others))
    assert torch.equal(attended(lengths, [0, 3, 10, 30], [1, 2, 3], **beside, window=window)[3:10], wanted)
    G, D = k.shape[2:]
    state = PagedAttentionState(
        random(1 + ROWS * MOST, PAGE, G, D, seed=3), random(1 + ROWS * MOST, PAGE, G, D, seed=4),
        1 + torch.arange(ROWS * MOST, dtype=torch.int32).view(ROWS, MOST), torch.tensor(lengths),
    )  # fmt: skip
    for n in range(7):
        one = [x[:, n : n + 1] for x in (q, k, v)]
        found = attend_pages(*one, state, Sequences(one[0], None, torch.tensor([2]), in_place=True), window)
        assert torch.equal(found[0, 0], wanted[n]), n
        state.length[2] += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_splits_by_programs_of_their_own_have_equal_bits(dtype, kernels_on_a_cpu, monkeypatch):
    from penstock.softmax.triton import pages

    q, k, v = random(3, 1, 6, 24, dtype=dtype), random(3, 1, 2, 24, seed=1, dtype=dtype), random(3, 1, 2, 24, seed=2, dtype=dtype)
    found = []
    for full in (0, 1000):
        monkeypatch.setattr(pages, "FULL", full)
        found.append(attended([600, 3, 511, 0, 512], None, [0, 2, 4], q=q, k=k, v=v, window=200))
    assert torch.equal(*found)


@torch.no_grad()
def test_whole_blocks_of_a_piece_have_the_bits_of_pieces_of_one_block():
    """In plain PyTorch a piece is processed in blocks of a page, then token by token."""
    q, k, v = random(1, 130, 4, 8), random(1, 130, 2, 8, seed=1), random(1, 130, 2, 8, seed=2)
    state = PagedAttentionState(
        torch.zeros(4, PAGE, 2, 8), torch.zeros(4, PAGE, 2, 8), torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([0])
    )
    once = attend_pages(q, k, v, state, Sequences(q, torch.tensor([0, 130]), torch.tensor([0]), in_place=True))
    parts, begin = [], 0
    for count in (64, 64, 1, 1):
        one = [x[:, begin : begin + count].clone() for x in (q, k, v)]
        state.length[0] = begin
        parts.append(attend_pages(*one, state, Sequences(one[0], torch.tensor([0, count]), torch.tensor([0]), in_place=True)))
        begin += count
    assert torch.equal(torch.cat(parts, 1), once)


@torch.no_grad()
def test_rows_without_room_and_calls_without_pools_are_refused():
    mixer = SoftmaxAttentionConfig(num_heads=2, max_length=PAGE).build(C)
    state = mixer.initial_state(2, torch.empty(0)).paged(3, 1)
    state.pages[:, 0] = torch.tensor([1, 2])
    mixer.advance(random(2, PAGE, C), state)
    assert state.length.tolist() == [PAGE] * 2
    with pytest.raises(RangeError, match="state must be a pool with room for 65 tokens a row, got room for 64"):
        mixer.advance(random(2, 1, C), state)
    with pytest.raises(DtypeError, match="state must be a SoftmaxAttentionState, got PagedAttentionState"):
        mixer(random(2, 1, C), state)
    with pytest.raises(DtypeError, match=r"state.pages must be"):
        mixer.advance(random(2, 1, C), state._replace(pages=state.pages.long()))
