"""Rows of pools of models whose states grow: calls without room for their tokens, and what unused places hold."""

import pytest
import torch
from architectures import ARCHITECTURES, flat, model_of

import penstock as ps
from penstock.layers.token_cache import caches

GROWING = [name for name, config in ARCHITECTURES.items() if any(mixer.grows for mixer in config.mixers)]
IDS = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(1))
PACKED = torch.tensor([0, 2, 9])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", GROWING)
def test_a_call_without_room_changes_nothing(name: str, packed: bool) -> None:
    """Layers before the one whose rows are too short, and recurrences beside attention, write nothing."""
    model, slots = model_of(name), torch.tensor([2, 0])
    pool = model.initial_state(3, max_length=8)
    model.advance(IDS[:, :4], pool, slots=slots)
    before = [x.clone() for x in flat(pool)]
    call = {"cu_seqlens": PACKED, "slots": slots} if packed else {"slots": slots}
    with pytest.raises(ps.RangeError, match=r"advance: state must be a pool with room for (9|11) tokens a row, got room for 8\."):
        model.advance(IDS.view(1, -1)[:, :9] if packed else IDS[:, :5], pool, **call)
    assert all(torch.equal(x, y) for x, y in zip(flat(pool), before))
    model.advance(IDS[:, :4], pool, slots=slots)  # all of the room


@pytest.mark.parametrize("name", GROWING)
def test_a_mixer_without_room_changes_nothing(name: str) -> None:
    model = model_of(name)
    mixer = next(layer.mixer for layer in model.layers if layer.mixer.config.grows)
    x = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(2))
    values = {one: IDS[:1, :3, None] if one == "ids" else x.new_ones(1, 3, size) for one, size in mixer.takes.items()} or None
    pool = mixer.initial_state(1, x, 2)
    with pytest.raises(ps.RangeError, match="room for 3 tokens a row, got room for 2"):
        mixer.advance(x, pool, values=values)
    assert all(not one.any() for one in flat(pool))


@pytest.mark.parametrize("name", GROWING)
def test_unused_places_of_rows_change_no_gradient(name: str) -> None:
    """NaN there, in rows of different lengths."""
    model = model_of(name, torch.float64)
    pool = model.initial_state(2, max_length=20)
    model.advance(IDS.view(1, -1)[:, :9], pool, cu_seqlens=PACKED)
    found = []
    for _ in range(2):
        for given, ends in ((IDS, None), (IDS.view(1, -1)[:, :9], PACKED)):
            loss = model(given, pool, ends).logits.square().mean()
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        for _, cache in caches(pool):
            for row, length in enumerate(cache.length.tolist()):
                cache.keys[row, length:] = cache.values[row, length:] = torch.nan
    for wanted, spoiled in zip(found[:2], found[2:]):
        assert all(torch.allclose(x, y, rtol=1e-12, atol=1e-14) for x, y in zip(wanted, spoiled))
