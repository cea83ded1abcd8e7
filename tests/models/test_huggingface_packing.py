"""Packed rows in transformers' classes, in all their forms: no sequence sees another."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from formulas import error
from torch.nn import functional as F

from penstock import RangeError, ShapeError

transformers = pytest.importorskip("transformers")
from transformers import DataCollatorWithFlattening  # noqa: E402
from wrapped_models import SMALL, drawn, wrapped  # noqa: E402

from penstock.models.huggingface import CACHE  # noqa: E402

pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]
LENGTHS = [3, 1, 5, 2]
STARTS = torch.tensor([0, 3, 4, 9, 11])
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]
FORMS: dict[str, dict[str, Any]] = {
    "cu_seqlens": {"cu_seqlens": STARTS},
    "cu_seq_lens": {"cu_seq_lens_q": STARTS.int(), "cu_seq_lens_k": STARTS.int(), "max_length_q": 5, "max_length_k": 5},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "position_ids": {"position_ids": POSITIONS},
    "positions from 2": {"position_ids": POSITIONS + 2},
    "all": {"cu_seq_lens_q": STARTS.int(), "cu_seq_lens_k": STARTS.int(), "seq_idx": NUMBERS, "position_ids": POSITIONS},
    "mask of ones": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 11, dtype=torch.int64)},
    "empty sequences": {"cu_seqlens": torch.tensor([0, 0, 3, 4, 4, 9, 11]), "position_ids": POSITIONS},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_sequence_of_a_packed_row_sees_another(name: str, form: str) -> None:
    model, ids = wrapped(name), drawn(1, 11)
    with torch.no_grad():
        alone = [model(one, use_cache=False).logits for one in ids.split(LENGTHS, 1)]
        for cached in (False, True):
            assert error(model(ids, **FORMS[form], use_cache=cached).logits, torch.cat(alone, 1)) < 1e-9
        hidden = model.model(input_ids=ids, **FORMS[form], use_cache=False).last_hidden_state
        assert error(model.head(hidden), torch.cat(alone, 1)) < 1e-9
    loss = model(ids, labels=ids, **FORMS[form]).loss
    losses = [F.cross_entropy(x[0, :-1], one[0, 1:], reduction="sum") for x, one in zip(alone, ids.split(LENGTHS, 1))]
    assert error(loss, torch.stack(losses).sum() / (11 - 4)) < 1e-9


@pytest.mark.parametrize("name", SMALL)
def test_several_packed_rows_with_padding(name: str) -> None:
    """Rows of different sequences, as packed batches of several rows have them, with padding on either side."""
    model, ids = wrapped(name), drawn(2, 6)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 0]])
    pieces = [(0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 1, 5)]
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2], [7, 8, 8, 8, 8, 9]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        for options in (
            {"position_ids": positions},
            {"position_ids": positions, "attention_mask": keep},
            {"seq_idx": numbers, "attention_mask": keep},
            {"cu_seqlens": torch.tensor([0, 2, 5, 6, 7, 11, 12])},
            {"cu_seqlens": torch.tensor([0, 2, 5, 6, 12]), "attention_mask": keep},
        ):
            found = model(ids, **options).logits
            for row, begin, end in pieces:
                assert error(found[row, begin:end], model(ids[row : row + 1, begin:end]).logits[0]) < 1e-9
        assert error(model(ids, position_ids=positions[:1]).logits[1, 2:5], model(ids[1:, 2:5]).logits[0]) < 1e-9, "of one row for all"


@pytest.mark.parametrize("name", SMALL)
def test_the_flattening_collator(name: str) -> None:
    model = wrapped(name)
    parts = [drawn(length, seed=length) for length in (4, 7, 2)]
    data = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in parts]
    losses = torch.stack([F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="sum") for one in parts])
    for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}, {"return_position_ids": False, "return_seq_idx": True}):
        batch = DataCollatorWithFlattening(return_tensors="pt", **options)(data)
        assert error(model(**batch).loss, losses.sum() / 10) < 1e-9


def test_positions_of_padded_and_continued_rows_are_no_packing() -> None:
    """transformers makes positions from masks, and goes on counting behind a cache."""
    model, ids = wrapped("retnet"), drawn(2, 6)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (keep.cumsum(1) - 1).masked_fill(keep == 0, 1)
    with torch.no_grad():
        wanted = model(ids, attention_mask=keep).logits
        assert error(model(ids, attention_mask=keep, position_ids=positions).logits, wanted) < 1e-12
        whole, first = model(ids).logits, model(ids[:, :2], use_cache=True)
        rest = model(ids[:, 2:], past_key_values=first[CACHE], position_ids=torch.arange(2, 6)[None].expand(2, -1)).logits
        assert error(rest, whole[:, 2:]) < 1e-9


def test_errors_of_packing() -> None:
    model, ids = wrapped("gla"), drawn(1, 11)
    for options, kind, message in (
        ({"position_ids": POSITIONS * 2}, RangeError, "position_ids must be that of the token before plus 1, or begin again"),
        ({"position_ids": POSITIONS[0]}, ShapeError, r"position_ids must be .* of shape \[1, 11\], got torch.int64 \[11\]"),
        ({"position_ids": POSITIONS.double()}, ShapeError, "position_ids must be an int64 or int32 tensor"),
        ({"seq_idx": NUMBERS[:, 1:]}, ShapeError, r"seq_idx must be .* of shape \[1, 11\], got torch.int64 \[1, 10\]"),
        ({"cu_seq_lens_q": STARTS[None]}, ShapeError, r"cu_seq_lens_q must be .* of shape \[N\+1\], got torch.int64 \[1, 5\]"),
        ({"cu_seq_lens_k": STARTS}, RangeError, "cu_seq_lens_k must be None without cu_seq_lens_q"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS[1:]}, RangeError, "cu_seq_lens_k must be offsets that begin at 0"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS[[0, 1, 4]]}, RangeError, "cu_seq_lens_k must be of the same sequences as"),
        ({"cu_seqlens": STARTS, "seq_idx": NUMBERS.clamp(max=2)}, RangeError, "seq_idx must be of the same sequences as cu_seqlens"),
        ({"cu_seqlens": STARTS, "position_ids": torch.arange(11)[None]}, RangeError, "position_ids must be of the same sequences as"),
        ({"cu_seqlens": STARTS[:-1]}, RangeError, "cu_seqlens must"),
        ({"cu_seqlens": STARTS + 1}, RangeError, "cu_seqlens must"),
    ):  # fmt: skip
        for call in (model, model.model):
            with pytest.raises(kind, match=message):
                call(ids, **options)
    with pytest.raises(RangeError, match="generate: position_ids must be one sequence a row, got packed ones"):
        model.generate(ids, position_ids=POSITIONS, max_new_tokens=2)
