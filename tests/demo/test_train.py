"""The demo's training: its text, its loop, and its files."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest
import torch
from clocks import Simulated
from rich.console import Console

from penstock import PenstockError, RangeError
from penstock.demo import train as training
from penstock.demo.text import python_topics, split
from penstock.demo.train import Trained, train
from penstock.models import CausalLM, load, rwkv6
from penstock.verify.machine import using_threads

TEXT = python_topics()[:30_000]


@pytest.fixture(scope="module", params=list(training.MODELS))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def terminal(architecture: str) -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def trained(architecture: str, tmp_path_factory: pytest.TempPathFactory, terminal: io.StringIO) -> Trained:
    """Trained on the first part of the text only, because evaluation of the whole text takes long.

    A step takes 0.1 seconds on any machine.
    """
    folder = tmp_path_factory.mktemp("trained") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch, using_threads(1):
        patch.setattr(training.text, "python_topics", lambda: TEXT)
        patch.setattr(training, "time", Simulated(step=0.1))
        return train(folder, seconds=2.0, console=Console(file=terminal, force_terminal=True, width=100), seed=3, architecture=architecture)


def test_a_short_training_lowers_the_loss(trained: Trained) -> None:
    assert trained.loss_before == pytest.approx(math.log(256), abs=0.3)
    assert trained.loss_after < trained.loss_before - 0.02
    assert trained.bits_per_byte == pytest.approx(trained.loss_after / math.log(2))
    assert trained.seconds == pytest.approx(2.0, abs=0.11)
    assert trained.tokens == round(trained.seconds / 0.1) * training.BATCH * training.LENGTH
    assert 0.9e6 < trained.parameters < 1.2e6
    assert trained.sample.startswith("The with statement ")


def test_weights_are_saved_and_loaded(trained: Trained, architecture: str) -> None:
    assert trained.weights.name == f"{architecture}-bytes.pth"
    assert {"rwkv6": "blocks.0.att.time_maa_w1", "rwkv7": "blocks.0.att.x_r"}[architecture] in torch.load(
        trained.weights, weights_only=True
    )
    model = load(trained.weights)
    assert model.config == training.MODELS[architecture]
    held_out = split(TEXT).held_out
    assert training.evaluate(model, held_out) == pytest.approx(trained.loss_after, rel=1e-5)
    assert training.sample(model, training.PROMPT, 300, seed=3)[:50] == trained.sample[:50]


def test_the_curve_covers_the_training(trained: Trained) -> None:
    seconds, tokens, losses = zip(*trained.curve)
    assert list(seconds) == sorted(seconds)
    assert (seconds[-1], tokens[-1]) == (trained.seconds, trained.tokens)
    assert losses[-1] < losses[0]
    assert len(trained.curve) <= training.POINTS + 1


def test_console_shows_loss_and_speed(trained: Trained, terminal: io.StringIO) -> None:
    begin, *rest = terminal.getvalue().split("loss")
    assert "training" in begin
    assert rest
    assert "tokens/s" in rest[-1]
    assert "nan" not in terminal.getvalue()


def test_results_follow_from_the_seed_and_not_the_global_generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = rwkv6(vocab_size=256, num_layers=1, hidden_size=32, intermediate_size=64, head_size=16, mix_rank=4, decay_rank=4)
    monkeypatch.setitem(training.MODELS, training.DEFAULT, sizes)
    monkeypatch.setattr(training.text, "python_topics", lambda: TEXT)  # evaluation of the whole text takes long
    torch.manual_seed(9)
    state = torch.get_rng_state()
    # the time is so short that every run is one step
    one, same, other = (train(tmp_path, seconds=1e-9, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert (one.loss_before, one.loss_after, one.sample) == (same.loss_before, same.loss_after, same.sample)
    assert one.loss_before != other.loss_before


def test_only_matrices_have_weight_decay(architecture: str) -> None:
    model = CausalLM(training.MODELS[architecture])
    decaying, others = training.optimizer_of(model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert others["weight_decay"] == 0
    matrices = {"embeddings", "head", "receptance", "key", "value", "output", *({"gate"} if architecture == "rwkv6" else ())}
    assert {names[id(p)].split(".")[-2] for p in decaying["params"]} == matrices
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def test_loss_counts_every_prediction_once() -> None:
    torch.manual_seed(5)
    model = CausalLM(rwkv6(vocab_size=256, num_layers=1, hidden_size=16, intermediate_size=16, head_size=8, mix_rank=2, decay_rank=2))
    text = torch.randint(256, (18 * 8 + 5,), dtype=torch.uint8)
    losses = []
    for begin in range(0, 18 * 8, 8):
        logits, _ = model(text[None, begin : begin + 8].long())
        p = logits[0].log_softmax(-1)
        losses += [-p[i, int(text[begin + i + 1])].item() for i in range(8)]
    assert training.evaluate(model, text, length=8) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_training_and_held_out_text_are_disjoint() -> None:
    text = python_topics()
    assert len(text) > 100_000
    assert b'The "with" statement' in text
    train_part, held_out = split(text)
    assert train_part.dtype == held_out.dtype == torch.uint8
    assert bytes([*train_part.tolist(), *held_out.tolist()]) == text
    assert len(held_out) == pytest.approx(len(text) / 10, abs=1)
    paragraphs = [part for part in text.split(b"\n\n") if part.strip()]
    assert len(paragraphs) == len(set(paragraphs))


def test_a_python_without_the_text_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(PenstockError, match=r"without pydoc_data\.topics"):
        python_topics()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_must_be_finite_and_positive(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(RangeError, match="seconds must be a finite number above 0"):
        train(tmp_path, seconds=seconds)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RangeError, match=r"train: model must be one of rwkv6, rwkv7, got 'lstm'"):
        train(tmp_path, architecture="lstm")
