"""Settings of a tiny training."""

import pytest
from tiny_training import TEXT

from penstock.training.settings import parse


@pytest.fixture
def settings(tmp_path):
    """Make settings of a tiny training, with changes by ``section__key``."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[::-1])

    def make(**changes):
        content = {
            "model": {"architecture": "rwkv6", "hidden_size": 16, "num_layers": 1, "head_size": 8, "mix_rank": 2, "decay_rank": 2},
            "data": {"train": str(tmp_path / "a.txt"), "length": 32},
            "training": {
                "output": str(tmp_path / "run"), "steps": 8, "batch_size": 4, "learning_rate": 1e-2, "log_every": 2, "save_every": 3,
                "tensorboard": False, "device": "cpu",
            },
        }  # fmt: skip
        for name, value in changes.items():
            section, key = name.split("__")
            content[section][key] = value
        return parse(content)

    return make
