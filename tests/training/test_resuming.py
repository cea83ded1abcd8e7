"""Resuming from a checkpoint gives the weights of an uninterrupted run; incomplete, damaged and foreign checkpoints are refused."""

import shutil

import pytest
import torch
from sampling import every

from penstock import RangeError
from penstock.training.run import train
from penstock.training.schedule import SCHEDULES

pytest.importorskip("transformers")
from tiny_training import Stop, Watch, equal, weights


@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(settings, tmp_path, packing):
    common = {"data__packing": packing, "data__separator": "\n\n" if packing else None, "training__accumulate": 2}
    whole = train(settings(**common, training__output=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        train(settings(**common), callbacks=(Stop(5),))
    assert [one.name for one in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    resumed = train(settings(**common))
    assert resumed.steps == whole.steps == 8
    assert equal(weights(resumed.folder), weights(whole.folder))
    assert equal(weights(train(settings(**common)).folder), weights(whole.folder))  # nothing is left to do


@pytest.mark.parametrize("steps", [3, 2])
def test_a_run_without_steps_left_changes_nothing(settings, tmp_path, steps):
    """The Trainer itself would take one step more than it has."""
    common = {"training__schedule": "constant", "data__evaluation": str(tmp_path / "b.txt")}
    done = train(settings(**common, training__steps=3))
    before = weights(done.folder)
    again = train(settings(**common, training__steps=steps))
    assert (again.steps, again.loss, again.evaluation_loss) == (3, done.loss, pytest.approx(done.evaluation_loss))
    assert equal(weights(again.folder), before)
    assert train(settings(**common, training__steps=4)).steps == 4


def test_checkpoints_that_are_not_whole(settings, tmp_path):
    """One whose writing was interrupted is left out; without the optimizer's state there is nothing to go on from."""
    whole = train(settings(training__output=str(tmp_path / "whole"), training__steps=5))
    train(settings(training__steps=5, training__save_every=3))
    (tmp_path / "run" / "checkpoint-5" / "trainer_state.json").unlink()
    resumed = train(settings(training__steps=5))
    assert equal(weights(resumed.folder), weights(whole.folder))
    (tmp_path / "run" / "checkpoint-5" / "optimizer.pt").unlink()
    with pytest.raises(RangeError, match=r"must be a folder of whole checkpoints, got '.*checkpoint-5' without optimizer.pt\. Remove this"):
        train(settings(training__steps=7))


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "text": lambda content: b"no checkpoint",
    "of another kind": lambda content: b"[1]",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "config.json", "model.safetensors"]
)
def test_a_damaged_file_of_a_checkpoint_is_named(settings, tmp_path, name, damage):
    train(settings(training__steps=4))
    file = tmp_path / "run" / "checkpoint-4" / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(RangeError) as caught:
        train(settings(training__steps=5))
    message = str(caught.value)
    place = file.parent if name in ("config.json", "model.safetensors") else file
    assert message.startswith(f"train: training.output must be a folder of whole checkpoints, got {str(place)!r} (")
    assert name in message
    assert message.endswith(f"). Remove this checkpoint: the same command then continues from {tmp_path}/run/checkpoint-3.")
    assert len(message.splitlines()) == 1
    shutil.rmtree(file.parent)
    assert train(settings(training__steps=4)).steps == 4


MISSING = {
    name: (name,) for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json", "model.safetensors")
} | {"several": ("optimizer.pt", "rng_state.pth")}  # fmt: skip


@pytest.mark.parametrize("names", MISSING.values(), ids=MISSING)
def test_a_missing_file_of_a_checkpoint_is_named(settings, tmp_path, names):
    """But trainer_state.json: the Trainer writes it last, and a checkpoint without it is one that is not whole."""
    train(settings(training__steps=4))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert {one.name for one in checkpoint.iterdir()} - {"training_args.bin"} == {"trainer_state.json"}.union(*MISSING.values())
    for name in names:
        (checkpoint / name).unlink()
    with pytest.raises(RangeError) as caught:
        train(settings(training__steps=5))
    message = str(caught.value)
    assert message.startswith("train: training.output must be a folder of whole checkpoints, got ")
    assert all(name in message for name in names)
    assert message.endswith(f"Remove this checkpoint: the same command then continues from {tmp_path}/run/checkpoint-3.")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_state_of_another_training_is_named(settings, tmp_path, name):
    train(settings(training__steps=2))
    torch.save({"state": {}, "param_groups": []}, tmp_path / "run" / "checkpoint-2" / name)
    with pytest.raises(RangeError, match=rf"checkpoint-2/{name}' \(.*\)\. Remove this checkpoint: the same command then begins again\."):
        train(settings(training__steps=3))


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1, 1.3])
def test_a_run_without_epochs_left_changes_nothing(settings, epochs):
    common = {"training__steps": None, "training__epochs": epochs, "training__accumulate": 2}
    done = train(settings(**common))
    before = weights(done.folder)
    again = train(settings(**common))
    assert again.steps == done.steps > 0
    assert equal(weights(again.folder), before)


def test_checkpoints_of_another_model_are_refused(settings):
    train(settings(training__steps=3))
    with pytest.raises(RangeError, match=r"train: training\.output must be a folder whose checkpoints are of the same model"):
        train(settings(model__num_layers=2))
    with pytest.raises(RangeError, match=r"training\.output must be a folder without checkpoints if training\.resume is false"):
        train(settings(training__resume=False))


@pytest.mark.parametrize("schedule", every(3, SCHEDULES))
def test_a_resumed_run_has_the_learning_rates_of_a_whole_one(settings, tmp_path, schedule):
    whole, before, after = Watch(), Watch(), Watch()
    train(settings(training__schedule=schedule, training__output=str(tmp_path / "whole")), callbacks=(whole,))
    with pytest.raises(KeyboardInterrupt):
        train(settings(training__schedule=schedule), callbacks=(before, Stop(5)))
    train(settings(training__schedule=schedule), callbacks=(after,))
    assert before.rates[:3] + after.rates == pytest.approx(whole.rates)


class Look:
    """A callback that keeps the settings of the optimizer in each step, and the steps of logs and checkpoints."""

    def __new__(cls):
        from transformers import TrainerCallback

        class Looking(TrainerCallback):
            def __init__(self):
                self.groups, self.logged, self.saved = [], [], []

            def on_step_begin(self, args, state, control, optimizer=None, **_):
                self.groups.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])

            def on_log(self, args, state, control, logs=None, **_):
                self.logged += [state.global_step] * ("loss" in logs)

            def on_save(self, args, state, control, **_):
                self.saved.append(state.global_step)

        return Looking()


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 3e-3, "betas": [0.5, 0.6], "weight_decay": 0.2},
        {"schedule": "constant", "warmup": 0.5},
        {"steps": 12, "save_every": 2, "log_every": 1, "learning_rate": 1e-4},
    ],
)
def test_a_resumed_run_has_the_settings_of_its_file(settings, tmp_path, changes):
    """From its first step on, as if all steps had them."""
    given = {f"training__{name}": value for name, value in changes.items()}
    whole, resumed = Look(), Look()
    train(settings(**given, training__output=str(tmp_path / "whole")), callbacks=(whole,))
    with pytest.raises(KeyboardInterrupt):
        train(settings(), callbacks=(Stop(5),))
    train(settings(**given), callbacks=(resumed,))
    assert resumed.groups == whole.groups[3:]
    assert resumed.logged == [step for step in whole.logged if step > 3]
    assert resumed.saved == [step for step in whole.saved if step > 3]
