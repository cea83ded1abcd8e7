"""Linear maps of few rows on Hopper, emulated on the CPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from emulated import gluon

launch = pytest.importorskip("penstock.layers.triton.hopper_products_launch", reason="needs Gluon")
few_rows = pytest.importorskip("penstock.layers.triton.few_rows_launch")
COUNTS = few_rows.COUNTS
Tiling = launch.Tiling

DTYPES = [torch.bfloat16, torch.float16]
BLOCKS = Tiling(4, 1, 4, rows=16)
FORMS = [
    Tiling(1, 1, 12),
    Tiling(1, 2, 6),
    Tiling(2, 1, 3),
    launch.HALVES,
    Tiling(2, 1, 4, rows=64),
    Tiling(4, 1, 8),
    Tiling(4, 2, 2),
    BLOCKS,
]
MANY = [
    Tiling(1, 1, 6, 8, 128), Tiling(1, 1, 3, 8, 128), Tiling(1, 1, 4, 8, 128, 256), Tiling(1, 1, 5, 8, 64, 256), Tiling(1, 1, 8, 8),
    Tiling(1, 1, 7, 8, 64, 128, 3), Tiling(1, 1, 4, 8, 128, 0, 3), Tiling(1, 1, 5, 8, 128, 64, 4), Tiling(1, 1, 8, 4, 64, 64, 4), BLOCKS,
]  # fmt: skip
"""For more rows."""
SPREAD = [
    Tiling(1, 1, 9, 8, 128, 128, 4, 2),
    Tiling(1, 1, 8, 4, SPREAD=4),
    Tiling(1, 1, 4, 8, 128, 128, 3, 4),
    Tiling(1, 1, 16, 8, 64, 64, 6, 4),
]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def close(found, wanted, roundings=4):
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= roundings * torch.finfo(found.dtype).eps * wanted.double().norm()


def products(inputs, weights, form, gate=None, *, relu_squared=False, early=True, lasts=None):
    """What a launch computes. Tensors that are no weights are not known before the wait for the kernel ahead."""
    inputs = [x.clone() for x in inputs] if early else inputs
    gate = None if gate is None else gate.clone()
    results = [x.new_full((x.shape[0], weight.shape[0]), float("nan")) for x, weight in zip(inputs, weights)]
    counts = torch.zeros(64, dtype=torch.int32)
    options = {"relu_squared": relu_squared, "early": early, "counts": counts, "lasts": lasts}
    given = launch.arguments(inputs, weights, results, gate, form, **options)
    tiles = [gluon.Descriptor(x, known["block_shape"]) for x, known in given.tiles]
    late = [*inputs, *([] if gate is None else [gate]), *([lasts.normed, lasts.slots] if lasts else [])] if early else []
    arguments = [*tiles, *given.others]
    gluon.launch(launch.hopper_products.penstock_products_hopper, given.programs, arguments, given.constants, form.warps, late=late)
    assert not counts.any()
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 72), (9, 512), (3, 2048), (40, 1160)])
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products(form, parts, rows, size, dtype):
    inputs = [normal(rows, size, dtype=dtype, seed=part) for part in range(parts)]
    weights = [normal(count, size, dtype=dtype, seed=part) / 8 for part, count in enumerate((72, 40, 16, 33, 1, 24, 8)[:parts])]
    exact = [x.double() @ weight.double().T for x, weight in zip(inputs, weights)]
    wanted = [torch.relu(exact[0]).square(), *exact[1:]]
    by_columns = [one if len(one) % 8 else one.T.contiguous().T for one in weights]
    for one, early in ((weights, True), (by_columns, False)):
        for y, formula in zip(products(inputs, one, form, relu_squared=True, early=early), wanted):
            close(y, formula)
    gate = normal(rows, 72, dtype=dtype)
    (y,) = products(inputs[:1], weights[:1], form, gate)
    close(y, exact[0] * gate.double().sigmoid())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(129, 64), (192, 520), (300, 392)])
@pytest.mark.parametrize("form", [*MANY, *SPREAD], ids=str)
def test_many_rows(form, rows, size, dtype):
    inputs = [normal(rows, size, dtype=dtype, seed=part) for part in range(3)]
    weights = [normal(count, size, dtype=dtype, seed=part) / 8 for part, count in enumerate((136, 264, 1))]
    exact = [x.double() @ weight.double().T for x, weight in zip(inputs, weights)]
    by_columns = [weights[0].T.contiguous().T, *weights[1:]], [weights[0], *(one.T.contiguous().T for one in weights[1:2]), weights[2]]
    for one in (weights, *by_columns):
        for y, formula in zip(products(inputs, one, form, relu_squared=True), [torch.relu(exact[0]).square(), *exact[1:]]):
            close(y, formula)
    gate = normal(rows, 136, dtype=dtype)
    (y,) = products(inputs[:1], weights[:1], form, gate)
    close(y, exact[0] * gate.double().sigmoid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slot", [7, 0, -1])
@pytest.mark.parametrize("form", [Tiling(4, 1, 8), launch.HALVES, Tiling(1, 2, 6)], ids=str)
def test_the_row_of_a_pool_is_replaced(form, slot, dtype):
    """None for a negative slot. The products do not change."""
    x, weight, gate, normed = (normal(*shape, dtype=torch.bfloat16) for shape in ((1, 520), (72, 520), (1, 72), (1, 72)))
    pool, slots = normal(9, 2, 72, dtype=dtype)[:, 1], torch.tensor([slot])
    wanted = pool.clone()
    if slot >= 0:
        wanted[slot] = normed[0].to(dtype)
    (alone,), (y,) = (products([x], [weight], form, gate, lasts=lasts) for lasts in (None, few_rows.Lasts(normed, pool, slots)))
    assert torch.equal(y, alone)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("rows", [1, 3])
def test_views(rows):
    """A single row of any stride, and tensors that do not begin at a multiple of 16 bytes."""
    x, weight = normal(rows, 72, dtype=torch.bfloat16), normal(1, 72, dtype=torch.bfloat16)
    wanted = x.double() @ weight.double().T
    behind = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, 72)
    gaps = torch.cat([x, x[:, :1]], 1)[:, :72]
    for one in (behind, gaps if rows == 1 else x):
        for other in (weight, torch.cat([weight, weight[:, :1]], 1)[:, :72], weight.flatten()[:, None].T):
            assert launch.takes([other])
            (y,) = products([one], [other], Tiling(4, 1, 8), early=False)
            close(y, wanted)
    assert not launch.takes([torch.empty(73, dtype=torch.bfloat16)[1:].view(1, 72)])
    assert launch.takes([torch.empty(8, 24, dtype=torch.bfloat16).T])
    assert not launch.takes([torch.empty(6, 24, dtype=torch.bfloat16).T])  # rows of the input have 12 bytes
    assert not launch.takes([torch.empty(8, 12, dtype=torch.bfloat16).T])
    assert not launch.takes([torch.empty(2**22, 64, dtype=torch.bfloat16, device="meta")])


@pytest.mark.parametrize(
    ("form", "rows"),
    [*itertools.product([Tiling(1, 2, 6), *MANY, *SPREAD], [1, 128, 300]), (Tiling(4, 1, 8), 1), (Tiling(4, 1, 8), 32)],
    ids=str,
)
def test_order_of_sums(form, rows):
    """Each block of K has one product. Between two large ones that cancel, sums are rounded: bits depend on the order of blocks."""
    blocks, weight = torch.arange(23), normal(136, 23 * 64, dtype=torch.bfloat16)
    x = torch.zeros(rows, 23, 64, dtype=torch.bfloat16)
    x[:, blocks, blocks] = normal(rows, 23, dtype=torch.bfloat16)
    split = form.APART * form.SPREAD
    weight[:, 65 * 18] = weight[:, 65 * 6]
    x[:, 6, 6], x[:, 18, 18] = 2**16, -(2**16)
    wanted = torch.zeros(rows, 136)
    for part in range(split):
        total = torch.zeros(rows, 136)
        for block in blocks[part::split]:
            total += x[:, block, block, None].float() * weight[:, 65 * block].float()
        wanted = total if part == 0 else wanted + total
    (y,) = products([x.flatten(1)], [weight], form)
    assert y.equal(wanted.bfloat16())


SIZES = [(64, 2048, 2048, 2048, 2048), (7168, 2048), (2048,), (160,), (65536,), (2688, 768), (2048, 2048, 2048, 96, 96, 256, 64)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forms_of_any_number_of_rows_sum_the_same_parts(sizes):
    weights = [torch.empty(N, 2048, device="meta") for N in sizes]
    split = launch.split_of(weights)
    assert split == (1 if sum(sizes) > 7168 else 2 if sum(sizes) > 6400 else 4)
    for rows in (1, 8, 9, 17, 33, 64, 65, 128, 129, 192, 193, 256, 300, 384, 512, 513):
        form = launch.form_of(rows, weights, 132)
        assert form is not None or rows > 128
        assert form is None or split == form.APART * form.SPREAD


def test_five_maps_of_5_to_8_rows_have_two_parts_of_k():
    """Only where bits may depend on the number of rows, and if all programs of 32 weights run two on a multiprocessor."""
    five, others = (64, 2048, 2048, 2048, 2048), [sizes for sizes in SIZES if len(sizes) < 5]
    weights = [torch.empty(N, 2048, device="meta") for N in five]
    found = {rows for rows in range(1, 600) if launch.form_of(rows, weights, 132, alike=False) == launch.HALVES}
    assert found == {5, 6, 7, 8}
    assert all(launch.form_of(rows, weights, 128, alike=False) == launch.form_of(rows, weights, 128) for rows in range(1, 600))
    for sizes in [*others, (64, 1024, 1024, 1024, 1024)]:
        weights = [torch.empty(N, 2048, device="meta") for N in sizes]
        assert all(launch.form_of(rows, weights, 132, alike=False) == launch.form_of(rows, weights, 132) for rows in range(1, 600))


@pytest.mark.parametrize("alike", [False, True])
def test_the_form_of_five_maps_follows_the_mode(alike, monkeypatch):
    forms, weights = [], [torch.empty(N, 2048) for N in (64, 2048, 2048, 2048, 2048)]
    monkeypatch.setattr(few_rows, "_hopper", lambda device, weights: launch)
    monkeypatch.setattr(few_rows.Target, "of", lambda device: few_rows.Target("sm_90", 132, 227 << 10))
    monkeypatch.setattr(launch, "products", lambda *given, form, **options: forms.append(form) or [])
    compute = few_rows.products_alike if alike else few_rows.products
    for rows in (1, 4, 5, 8, 9):
        compute([torch.empty(rows, 2048)] * 5, weights)
    one, four = Tiling(1, 2, 6), Tiling(1, 2, 5)
    assert forms == ([one] * 4 if alike else [one, one, launch.HALVES, launch.HALVES]) + [four]


@pytest.mark.parametrize("size", [8, 64, 72, 320, 65536])
@pytest.mark.parametrize("multiprocessors", [16, 78, 132, 144])
def test_forms_fit_a_multiprocessor(multiprocessors, size):
    """Their rings, with room for results, the columns of a product, and the counts of tiles, for few and many weights."""
    rows_of_weights = [1, 64, 65, 128, 129, 2048, 4480, 6336, 6337, 8448, 8449, 65536]
    for N, rows in itertools.product(rows_of_weights, (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 384, 385, 512, 513)):
        weight, x = torch.empty(N, size, device="meta"), torch.empty(rows, size, device="meta")
        form = launch.form_of(rows, [weight], multiprocessors)
        if form is None:
            continue
        assert launch.split_of([weight]) == form.APART * form.SPREAD
        given = launch.arguments([x.half()], [weight.half()], [x], None, form, relu_squared=False, early=True, counts=x)
        BM, stages, x_stages = (given.constants[name] for name in ("BM", "STAGES", "X_STAGES"))
        HEIGHT, columns = form.HEIGHT, form.APART * BM
        x_bytes, w_bytes = x_stages * form.GROUPS * columns * 128, stages * form.GROUPS * HEIGHT * 128
        assert x_bytes + w_bytes + 8 * (x_stages + stages + 1) <= 232448
        assert w_bytes >= HEIGHT * columns * 4 if form.APART > 1 else x_bytes >= HEIGHT * columns * 2
        assert 8 <= columns * HEIGHT // (16 * form.warps) <= 256
        assert given.programs[0] * BM >= rows
        assert form.SPREAD == 1 or given.programs[0] * given.programs[1] <= COUNTS
        steps = -(-size // (64 * form.GROUPS * form.APART * form.SPREAD))
        assert steps <= min(stages, x_stages) or min(stages, x_stages) >= 2


def test_single_maps_of_up_to_128_rows(monkeypatch):
    """By this kernel on Hopper where it is faster: few weights in blocks of 16 rows, a long K up to 64 rows, one tile a multiprocessor."""
    decisions = pytest.importorskip("penstock.layers.triton.few_rows_launch")
    monkeypatch.setattr(decisions, "_form", lambda x, weights, alike: launch.form_of(x.shape[0], weights, 132, alike=alike))

    monkeypatch.setattr(decisions.Target, "of", lambda device: SimpleNamespace(multiprocessors=132))

    def taken(rows, K, *counts, alike=False):
        return decisions.takes(normal(rows, K), [torch.empty(N, K, device="meta") for N in counts], alike)

    yes = [(rows, K, N) for rows in (1, 32) for K, N in ((2048, 2048), (7168, 2048), (2048, 65536))]
    yes += [(33, 7168, 2048), (64, 7168, 2048), (33, 2048, 160), (128, 2048, 160), (128, 2048, 7168, 2048), (512, 2048, 4096, 4096)]
    yes += [(33, 2048, 8192), (128, 2048, 8192), (128, 2048, 2048, 2048, 2048, 96, 96, 256, 64)]
    no = [(65, 7168, 2048), (129, 2048, 8192), (128, 2048, 65536), (33, 2048, 2048), (33, 2048, 65536), (129, 2048, 512, 512)]
    assert [one for one in yes if not taken(*one)] == [one for one in no if taken(*one)] == []
