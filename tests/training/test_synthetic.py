"""Models that learn synthetic tasks."""

import pytest
import torch
from clocks import Simulated

from penstock.models import CausalLM
from penstock.training import synthetic
from penstock.training.data import IGNORED
from penstock.training.mqar import Recall
from penstock.training.reversal import Reversal
from penstock.training.settings import ARCHITECTURES
from penstock.training.synthetic import evaluate, learn, model_config
from penstock.verify.machine import using_threads

TASKS = Recall(2, 10, 16), Reversal(4)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_accuracy_counts_labels_only(task):
    torch.manual_seed(0)
    model = CausalLM(model_config("rwkv6", task, hidden_size=16, num_layers=1))
    tokens, labels = task.draw(100, torch.Generator().manual_seed(0))
    best = model(tokens).logits.argmax(-1)
    right = [best[n, t] == labels[n, t] for n, t in (labels != IGNORED).nonzero().tolist()]
    assert evaluate(model, tokens, labels) == sum(right) / len(right)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_takes_every_task(architecture, task, monkeypatch):
    monkeypatch.setattr(synthetic, "CHECKED", 8)
    monkeypatch.setattr(synthetic, "BATCH", {"cpu": 4})
    model = CausalLM(model_config(architecture, task, hidden_size=16, num_layers=2))
    seen = []
    points = learn(model, task, seconds=1e-6, report=seen.append)
    assert points == seen
    assert points[-1].steps == 1


@pytest.mark.slow
def test_rwkv6_learns_two_pairs(monkeypatch):
    monkeypatch.setattr(synthetic, "time", Simulated(step=0.1))  # 400 steps on any machine
    recall = Recall(2, 8, 8)
    torch.manual_seed(0)
    with using_threads(1):
        points = learn(CausalLM(model_config("rwkv6", recall, hidden_size=32, num_layers=2)), recall, seconds=40, enough=0.9)
    assert points[-1].accuracy >= 0.9


@pytest.mark.slow
def test_rwkv7_learns_to_reverse_numbers(monkeypatch):
    monkeypatch.setattr(synthetic, "time", Simulated(step=0.15))  # 600 steps on any machine
    task = Reversal(3)
    torch.manual_seed(0)
    with using_threads(1):
        points = learn(CausalLM(model_config("rwkv7", task, hidden_size=32, num_layers=2)), task, seconds=90, enough=0.99)
    assert points[-1].accuracy >= 0.99
