"""What tests of training runs share: a text, callbacks, and weights of folders."""

from pathlib import Path

import torch

from penstock.models import load

TEXT = "the cat sat on the mat. \n\n" * 80


class Stop:
    """A callback that raises after this many steps."""

    def __new__(cls, steps):
        from transformers import TrainerCallback

        class Stopping(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == steps:
                    raise KeyboardInterrupt

        return Stopping()


def weights(folder):
    return load(Path(folder)).state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Watch:
    """A callback that keeps the learning rate of each step, and counts evaluations."""

    def __new__(cls):
        from transformers import TrainerCallback

        class Watching(TrainerCallback):
            def __init__(self):
                self.rates, self.evaluations = [], 0

            def on_step_begin(self, args, state, control, optimizer=None, **_):
                self.rates.append(optimizer.param_groups[0]["lr"])

            def on_evaluate(self, args, state, control, **_):
                self.evaluations += 1

        return Watching()
