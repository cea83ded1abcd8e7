"""Loading and saving in every format, against the formulas of tests/public_models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from formulas import error
from public_models import tokens
from public_models.published import PUBLISHED, Published

from penstock.models import load, save

IDS = tokens(64, 13)


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> Published:
    return PUBLISHED[request.param]


@torch.no_grad()
def test_logits_equal_the_formulas_for_every_split(published: Published, tmp_path: Path) -> None:
    path, true = published.write(tmp_path), published.logits(IDS)
    model = load(path)
    assert error(model(IDS[None]).logits[0], true) < 1e-5
    assert error(load(path, dtype=torch.float64)(IDS[None]).logits[0], true) < 1e-10

    state, parts = None, []
    for piece in IDS.split([1, 5, 2, 30, 26]):
        logits, state = model(piece[None], state)
        parts.append(logits[0])
    assert error(torch.cat(parts), true) < 1e-5
    pool = model.initial_state(1)
    serial = torch.cat([model.advance(one.view(1, 1), pool)[0] for one in IDS])
    assert error(serial, true) < 1e-5


def test_saved_again_has_equal_bits(published: Published, tmp_path: Path) -> None:
    model = load(published.write(tmp_path))
    for format in ("penstock", *published.formats):
        path = tmp_path / "again" / f"{format}.pth"
        save(model, path, format)
        again = load(path)
        assert again.config == model.config, format
        ours, theirs = model.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(x, theirs[name]) and x.dtype == theirs[name].dtype for name, x in ours.items()), format
