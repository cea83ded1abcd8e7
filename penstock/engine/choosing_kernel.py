"""The Triton kernel that chooses the tokens of all rows in one launch, one program per row. It is bitwise equal to ``choosing.choose``.

A program reads its logits twice: for the largest, and for the sum of weights of each lane. For top_k or top_p it stores the weights. It
searches the weight of the last of the top k, four bits per pass. After each draw it reads the weights once, for the sum and the number of
the tokens ranked before the drawn one. The order of draws keeps sums within lanes until the end of a pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.launch import on_device_of
from ..models.probabilities import LANES, LEAST_POWER, LN_2, LOG2_E, MAGIC, ONE, POLYNOMIAL, SHORT
from .choosing import ROUND
from .slot_tables import (
    BIASED,
    BIASES,
    COLUMNS,
    CONSTRAINED,
    FREQUENCY,
    KEY,
    LAST_RANK,
    LEAST,
    LIMITED,
    NEEDS,
    PENALISED,
    PRESENCE,
    REPETITION,
    SHARE,
    TEMPERATURE,
    SlotTables,
)
from .uniforms import LAST_SHIFT, ROUNDS, STEP

WARPS = 16
SEARCHED = 8192
"""Logits per load in the search for the largest."""
BITS, BEYOND = tl.constexpr(30), tl.constexpr(1 << 30)
"""The bits of a weight, which is at most 1, and a number above all of them."""
INF = tl.constexpr(float("inf"))
WHOLE, MAGIC_, SHORT_, LEAST_POWER_, LOG2_E_, LN_2_, ROUND_ = map(tl.constexpr, (ONE, MAGIC, SHORT, LEAST_POWER, LOG2_E, LN_2, ROUND))
C1, C2, C3, C4, C5, C6 = map(tl.constexpr, POLYNOMIAL)
STEPS, SHIFT, FACTOR, NEXT_SHIFT, NEXT_FACTOR, END = map(tl.constexpr, (STEP, *ROUNDS[0], *ROUNDS[1], LAST_SHIFT))
TEMPERATURE_, LAST_RANK_, SHARE_, LEAST_, REPETITION_, PRESENCE_, FREQUENCY_, NEEDS_, BIASES_, KEY_, COLUMNS_ = map(
    tl.constexpr, (TEMPERATURE, LAST_RANK, SHARE, LEAST, REPETITION, PRESENCE, FREQUENCY, NEEDS, BIASES, KEY, COLUMNS)
)
PENALISED_ = tl.constexpr(PENALISED)


@triton.jit
def _uniform(key, position):
    """``uniforms.uniforms``."""
    x = key.to(tl.uint64) + position.to(tl.uint64) * STEPS
    x = (x ^ (x >> SHIFT)) * FACTOR
    x = (x ^ (x >> NEXT_SHIFT)) * NEXT_FACTOR
    x = x ^ (x >> END)
    return (x >> 11).to(tl.int64).to(tl.float64) * (1 / 9007199254740992)


@triton.jit
def weight(y, largest, scale, high, low, lowest, least):
    """``probabilities.weights``; scale, high, low and lowest are functions of the temperature, see ``scales``."""
    d = tl.maximum(y - largest, lowest)
    shifted = d * scale + MAGIC_
    n = shifted - MAGIC_
    f = ((d - n * high) - n * low) * scale
    p = ((((f * C6 + C5) * f + C4) * f + C3) * f + C2) * f + C1
    p = p * f + 1.0
    found = (p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    return tl.where(found >= least, found, 0.0)


@triton.jit
def scales(temperature):
    """Functions of the temperature that ``weight`` needs."""
    c = temperature * LN_2_
    high = (c.to(tl.float32).to(tl.int32, bitcast=True) & SHORT_).to(tl.float32, bitcast=True)
    return (1.0 / temperature * LOG2_E_).to(tl.float32), high, (c - high.to(tl.float64)).to(tl.float32), (c * LEAST_POWER_).to(tl.float32)


@triton.jit
def whole(found):
    """``probabilities.whole``"""
    return (found * WHOLE).to(tl.int64)


@triton.jit
def top_of(x, V, SEARCHED: tl.constexpr):
    """The largest logit of a row in float32, the lowest token with it, and whether the row has a NaN."""
    lane = tl.arange(0, SEARCHED)
    top, bad, first = tl.full([SEARCHED], -INF, tl.float32), tl.zeros([SEARCHED], tl.int1), lane
    for begin in tl.range(0, V, SEARCHED, num_stages=3):
        y = tl.load(x + begin + lane, lane < V - begin, other=-INF).to(tl.float32)
        bad |= y != y
        first = tl.where(y > top, begin + lane, first)
        top = tl.where(y > top, y, top)
    largest = tl.max(top, 0)
    return largest, tl.min(tl.where(top == largest, first, V), 0), tl.max(bad.to(tl.int32), 0)


@triton.jit
def _in_lane(sums, drawn, LANES: tl.constexpr):
    """The lane of a position in the cumulative sum of lanes, and the sum of the lanes before it."""
    lane = tl.arange(0, LANES)
    found = tl.sum((tl.cumsum(sums, 0) <= drawn).to(tl.int32), 0)
    return found, tl.sum(tl.where(lane < found, sums, 0), 0)


@triton.jit
def _place(total, uniform):
    """A random position in a sum."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _before(found, at, bound, token):
    """Whether tokens with these weights are ranked before a token with weight ``bound``."""
    return (found > bound) | ((found == bound) & (at < token))


@triton.jit
def _changed(y, at, V, seen, mask, repetition, presence, frequency, PENALTIES, MASKED):
    """Biased logits of tokens, with penalties and masks."""
    inside = at < V
    if PENALTIES:
        has = tl.load(seen + at, inside, other=0)
        y = tl.where(has > 0, tl.where(y > 0, tl.div_rn(y, repetition), y * repetition), y)
        count = has >> 1
        y = tl.where(count > 0, y - (presence + count.to(tl.float32) * frequency), y)
    if MASKED:
        bits = tl.load(mask + (at >> 3), inside, other=0).to(tl.int32)
        y = tl.where(((bits >> (at & 7)) & 1) > 0, y, -INF)
    return y


@triton.jit
def _change(
    x, changed, V, numbers, seen, mask, bias_tokens, bias_values, W: tl.constexpr, PENALTIES, MASKED, LANES: tl.constexpr
):  # fmt: skip
    """Write the row's changed logits."""
    repetition = tl.load(numbers + REPETITION_).to(tl.float32)
    presence, frequency = tl.load(numbers + PRESENCE_).to(tl.float32), tl.load(numbers + FREQUENCY_).to(tl.float32)
    lane = tl.arange(0, LANES)
    for begin in tl.range(0, V, LANES):
        at = begin + lane
        y = tl.load(x + at, at < V, other=-INF).to(tl.float32)
        y = _changed(y, at, V, seen, mask, repetition, presence, frequency, PENALTIES, MASKED)
        tl.store(changed + at, y, at < V)
    biases = tl.load(numbers + BIASES_).to(tl.int32)
    if biases > 0:
        tl.debug_barrier()
        nth = tl.arange(0, W)
        at = tl.load(bias_tokens + nth).to(tl.int32)
        y = tl.load(x + at, nth < biases, other=0).to(tl.float32) + tl.load(bias_values + nth)
        y = _changed(y, at, V, seen, mask, repetition, presence, frequency, PENALTIES, MASKED)
        tl.store(changed + at, y, nth < biases)
    tl.debug_barrier()


@triton.jit
def _bytes(counts, digit, first: tl.constexpr):
    """``counts`` with 1 added to the byte of a digit, among the eight digits from ``first`` on."""
    at = digit - first
    return counts + tl.where(at < 8, tl.full([], 1, tl.uint64) << ((at & 7) * 8).to(tl.uint64), 0)


@triton.jit
def _top(found, V, last, LANES: tl.constexpr):
    """The least of the ``last`` + 1 largest weights of a row, and a number below it and above all smaller weights.

    A radix search from the upper bits, four per pass. A pass counts the weights that agree in the bits so far by their next four bits, in
    sixteen bytes of each lane. It ends when all of them are equal, or when these bits separate the ``last`` + 1 largest from the others.
    """
    lane = tl.arange(0, LANES)
    least, above, shift = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.full([], BITS, tl.int32)  # above: the number of larger weights
    searching = last >= 0
    while searching:
        size = tl.full([], 1, tl.int32) << shift
        shift = tl.maximum(shift - 4, 0)
        low, high = tl.zeros([LANES], tl.uint64), tl.zeros([LANES], tl.uint64)
        smallest, largest = tl.full([LANES], BEYOND, tl.int32), tl.zeros([LANES], tl.int32)
        for begin in tl.range(0, V, LANES, num_stages=3):
            w = tl.load(found + begin + lane, lane < V - begin, other=0).to(tl.int32, bitcast=True)
            within = (w >= least) & (w < least + size)
            smallest = tl.where(within, tl.minimum(smallest, w), smallest)
            largest = tl.where(within, tl.maximum(largest, w), largest)
            digit = tl.where(within, (w - least) >> shift, 16).to(tl.uint32)
            low, high = _bytes(low, digit, 0), _bytes(high, digit, 8)
        if tl.min(smallest, 0) == tl.max(largest, 0):
            least = tl.max(largest, 0)
            searching = last < 0
        else:
            taken = last < 0
            start, more = least, above
            for m in tl.static_range(16):
                number = tl.sum((((high if m < 8 else low) >> (8 * (7 - m % 8))) & 255).to(tl.int32), 0)
                here = (more + number > last) & (not taken)
                least = tl.where(here, start + ((15 - m) << shift), least)
                searching = tl.where(here, (more + number > last + 1) & (shift > 0), searching)
                above = tl.where(here, more, above)
                more += number
                taken |= here
    return least.to(tl.float32, bitcast=True), tl.maximum(least - 1, 0).to(tl.float32, bitcast=True)


@triton.jit
def _above(found, V, bound, token, LANES: tl.constexpr):
    """In each lane, the number and the sum of the weights ranked before a token with weight ``bound``."""
    lane = tl.arange(0, LANES)
    number, mass = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int64)
    for begin in tl.range(0, V, LANES, num_stages=3):
        w = tl.load(found + begin + lane, lane < V - begin, other=0)
        before = _before(w, begin + lane, bound, token)
        number += before.to(tl.int32)
        mass += whole(tl.where(before, w, 0.0))
    return number, mass


@triton.jit
def penstock_choose(
    x,  # [R,V], logits
    changed, found,  # [R,V] float32, written if CHANGED, and if LIMITED
    numbers,  # [slots,COLUMNS] float64, see ``slot_tables``
    bias_tokens, bias_values,  # [slots,W] int64 and float32
    seen,  # [slots,V] int32
    places,  # int64: [R] slots, [R] positions and, if MASKS, [R] the index of the mask, -1 for none, and the masks
    tokens, last,  # [R]; [slots] int64, written
    V, R, x_r,
    CHANGED: tl.constexpr, LIMITED: tl.constexpr, PENALTIES: tl.constexpr, MASKS: tl.constexpr, W: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """A row's token = the first one at which the cumulative sum of weights exceeds u times their sum, drawn again if it is not kept.

    See ``choosing``. If the position is negative, the most likely token.

    Reads x [R,V], numbers [slots,COLUMNS], seen [slots,V]. Writes tokens [R]; -1 if the largest logit is not finite. One program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_r
    found += row * V
    slot, position = tl.load(places + row), tl.load(places + R + row)
    numbers += slot * COLUMNS_
    penalised = False
    if CHANGED:
        changed += row * V
        seen += slot * V
        nth = -1
        if MASKS:
            nth = tl.load(places + 2 * R + row)
        if PENALTIES:
            penalised = (tl.load(numbers + NEEDS_).to(tl.int32) & PENALISED_) > 0
        words = tl.cdiv(V, 64)
        mask = (places + 3 * R + tl.maximum(nth, 0) * words).to(tl.pointer_type(tl.uint8))
        _change(x, changed, V, numbers, seen, mask, bias_tokens + slot * W, bias_values + slot * W, W, penalised, nth >= 0, LANES)
        largest, likely, bad = top_of(changed, V, SEARCHED)
    else:
        largest, likely, bad = top_of(x, V, SEARCHED)
    token = tl.full([], -1, tl.int32)
    if (bad == 0) & (tl.abs(largest) < INF):
        token = likely
        if position >= 0:
            lane = tl.arange(0, LANES)
            scale, high, low, lowest = scales(tl.load(numbers + TEMPERATURE_))
            least, key = tl.load(numbers + LEAST_).to(tl.float32), tl.load(numbers + KEY_).to(tl.int64, bitcast=True)
            sums = tl.zeros([LANES], tl.int64)
            for begin in tl.range(0, V, LANES, num_stages=3):
                at = begin + lane
                y = tl.load((changed if CHANGED else x) + at, at < V, other=-INF).to(tl.float32)
                w = weight(y, largest, scale, high, low, lowest, least)
                if LIMITED:
                    tl.store(found + at, w, at < V)
                sums += whole(w)
            if LIMITED:
                tl.debug_barrier()
                last_rank, share = tl.load(numbers + LAST_RANK_).to(tl.int32), tl.load(numbers + SHARE_)
                total, bound = tl.sum(sums, 0), tl.full([], -1, tl.float32)
                if last_rank < V - 1:
                    top, bound = _top(found, V, last_rank, LANES)
                    number, sums = _above(found, V, bound, 0, LANES)
                    total = tl.sum(sums, 0) - (tl.sum(number, 0) - last_rank - 1).to(tl.int64) * whole(top)
                limit, token = share * total.to(tl.float64), 0
                searching = last_rank >= 0
                while searching:
                    drawn = _place(tl.sum(sums, 0), _uniform(key, position))
                    following, before = _in_lane(sums, drawn, LANES)
                    column = following + LANES * tl.arange(0, COLUMNS)
                    w = tl.load(found + column, column < V, other=0)
                    w = whole(tl.where(_before(w, column, bound, token), w, 0.0))
                    token = following + LANES * tl.sum((before + tl.cumsum(w, 0) <= drawn).to(tl.int32), 0)
                    searching = (last_rank < V - 1) | (share < 1)
                    if searching:
                        bound = tl.load(found + token)
                        number, sums = _above(found, V, bound, token, LANES)
                        searching = (tl.sum(number, 0) > last_rank) | (tl.sum(sums, 0).to(tl.float64) >= limit)
                        position += ROUND_
            else:
                drawn = _place(tl.sum(sums, 0), _uniform(key, position))
                token, before = _in_lane(sums, drawn, LANES)
                column = token + LANES * tl.arange(0, COLUMNS)
                y = tl.load((changed if CHANGED else x) + column, column < V, other=-INF).to(tl.float32)
                w = whole(weight(y, largest, scale, high, low, lowest, least))
                token += LANES * tl.sum((before + tl.cumsum(w, 0) <= drawn).to(tl.int32), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(last + slot, token.to(tl.int64))
    if PENALTIES:
        counted = penalised & (token >= 0)
        tl.store(seen + token, tl.load(seen + token, counted, other=0) + 2, counted)


def choose_by_kernel(
    tables: SlotTables, logits: Tensor, places: Tensor, count: int, needs: int, last: Tensor, lanes: int = LANES, searched: int = SEARCHED
) -> Tensor:  # fmt: skip
    """int64 [R]: a token for each row of logits [R,V], also written to ``last`` at its slot. See the kernel.

    needs : int
        The union of the needs of all rows.
    """
    R, V = count, logits.shape[1]
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(R, dtype=torch.int64, device=x.device)
    is_changed, limited = needs & (BIASED | PENALISED | CONSTRAINED) > 0, needs & LIMITED > 0
    scratch = torch.empty(int(is_changed) + int(limited), R, V, dtype=torch.float32, device=x.device)
    seen = tokens if tables.seen is None else tables.seen
    bias_tokens, bias_values = tables.biases
    on_device_of(x, penstock_choose)[(R,)](
        x, scratch[0] if is_changed else x, scratch[-1] if limited else x, tables.numbers, bias_tokens, bias_values, seen, places, tokens,
        last, V, R, x.stride(0), CHANGED=is_changed, LIMITED=limited, PENALTIES=needs & PENALISED > 0, MASKS=needs & CONSTRAINED > 0,
        W=bias_tokens.shape[1], COLUMNS=triton.next_power_of_2(triton.cdiv(V, lanes)), LANES=lanes, SEARCHED=searched,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens
