"""Messages of a training run: the model and data before the first step, the expected time after the third."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..models import CausalLM
from .data import Windows
from .ranks import Ranks
from .settings import Mesh, Training

Say = Callable[[str], object]
TIMED = 3
"""Steps after which the expected time is printed. The first one is slower than the others and is not counted."""


def about_model(model: CausalLM, dtype: str, device: str, ranks: Ranks, mesh: Mesh) -> str:
    """The model and where it is trained."""
    kinds = ", ".join(dict.fromkeys(one.kind for one in model.config.mixers))
    threads = torch.get_num_threads()
    place = f"{device}, {threads} thread{'s' * (threads > 1)}" if device == "cpu" else device
    if ranks.count > 1:
        place += f", {ranks.count} ranks{', sharded' * mesh.shard}"
    return f"model: {kinds}, {sum(one.numel() for one in model.parameters()):,} parameters, {dtype} on {place}"


def about_data(samples: Windows, evaluation: Windows | None) -> str:
    """The training text and the evaluation text."""
    text = f"training: {len(samples.corpus.tokens):,} tokens, {len(samples):,} samples of {samples.length}"
    if evaluation is None:
        return text
    return f"{text}; evaluation: {len(evaluation):,} of {evaluation.whole:,} samples of {len(evaluation.corpus.tokens):,} tokens"


def about_steps(done: int, steps: int, batch: int, samples: Windows) -> str:
    """The steps of the run, each of ``batch`` samples; ``done`` were made before."""
    begin = f"steps {done + 1:,} to {steps:,}" if done else f"{steps:,} steps"
    passes = steps * batch / len(samples)
    return f"{begin}, each of {batch * samples.length:,} tokens ({batch} samples); {passes:.1f} passes over the text"


def about_time(seconds: float, steps: int) -> str:
    """The time of the remaining steps.

    >>> about_time(0.5, 480)
    '0.50 s a step: the other 480 steps take about 4 min, without evaluations'
    >>> about_time(2.0, 36000)
    '2.00 s a step: the other 36,000 steps take about 20.0 h, without evaluations'
    """
    left = seconds * steps
    unit = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    return f"{seconds:.2f} s a step: the other {steps:,} steps take about {unit}, without evaluations"


def teller(say: Say, about: list[str], samples: Windows, training: Training) -> Any:
    """The callback of the Trainer that prints these messages in the first process."""
    from transformers import TrainerCallback

    class Teller(TrainerCallback):
        begin, before = 0.0, 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.before = state.global_step
            batch = training.batch_size * training.accumulate
            if state.is_world_process_zero:
                for line in (*about, about_steps(self.before, state.max_steps, batch, samples)):
                    say(line)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done = state.global_step - self.before
            if done == 1:
                self.begin = time.perf_counter()
            elif done == TIMED and state.is_world_process_zero and state.max_steps > state.global_step:
                say(about_time((time.perf_counter() - self.begin) / (TIMED - 1), state.max_steps - state.global_step))

    return Teller()
