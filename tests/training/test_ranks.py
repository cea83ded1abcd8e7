"""Training on several processes: the losses are those of one, also where the number of processes changes on the way."""

import json
from itertools import chain

import pytest
import torch
from architectures import ARCHITECTURES
from ranks import spawned
from runs import content, losses, run

from penstock import RangeError
from penstock.models import load
from penstock.models.checkpoints.native import stored
from penstock.training import shards
from penstock.training.batches import Batches
from penstock.training.data import FILLER
from penstock.training.ranks import Ranks, find_ranks
from penstock.training.resuming import last_checkpoint, of_random
from penstock.training.settings import parse

pytest.importorskip("transformers")

SHARDED = {"shard": True}


def on_ranks(count, folder, cases):
    """The losses of runs on this many processes."""
    spawned(run, count, count, cases, str(folder / "found.json"))
    return json.loads((folder / "found.json").read_text())


def same(found, wanted):
    assert len(found[0]) == len(wanted[0])
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)


@pytest.mark.parametrize(("samples", "size"), [(15, 6), (8, 4), (3, 6), (1, 4)])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_order_of_samples_does_not_depend_on_the_number_of_ranks(samples, size, seed):
    alone = Batches(samples, size, Ranks(), seed)
    for epoch in range(2):
        alone.set_epoch(epoch)
        wanted = list(alone)
        assert len(alone) == len(wanted)
        assert sorted(chain.from_iterable(wanted)) == list(range(samples))
        for dp, cp in ((2, 1), (1, 2), (2, 2)):
            every = [Batches(samples, size, Ranks(dp, cp, rank), seed) for rank in range(dp * cp)]
            for one in every:
                one.set_epoch(epoch)
            for batch, *parts in zip(wanted, *every, strict=True):
                assert len({len(part) for part in parts}) == 1
                assert all(parts[rank] == parts[rank - rank % cp] for rank in range(dp * cp))
                assert [n for part in parts[::cp] for n in part if n != FILLER] == batch


def test_losses_of_two_ranks_are_those_of_one_process(tmp_path):
    wanted = losses(content(tmp_path, "one"))
    assert len(losses(content(tmp_path, "from one"), stop=4)[0]) == 4
    assert (tmp_path / "from one" / "checkpoint-3" / "optimizer.pt").is_file()
    cases = {
        "replicated": (content(tmp_path, "replicated"),),
        "cut": (content(tmp_path, "cut", mesh={"cp": 2}),),
        "interrupted": (content(tmp_path, "interrupted", mesh=SHARDED), 4),
        "from one": (content(tmp_path, "from one", mesh=SHARDED),),
    }
    found = on_ranks(2, tmp_path, cases)
    assert len(found["interrupted"][0]) == 4
    for name in ("replicated", "cut", "from one"):
        same(found[name], wanted)
    assert (tmp_path / "interrupted" / "checkpoint-3" / "shards" / ".metadata").is_file()
    same(losses(content(tmp_path, "interrupted")), wanted)
    one = load(tmp_path / "one").state_dict()
    for name in ("replicated", "cut", "from one", "interrupted"):
        torch.testing.assert_close(load(tmp_path / name).state_dict(), one, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rwkv6", "mamba2"])
@pytest.mark.parametrize("packing", [False, True])
def test_the_number_of_ranks_may_change(tmp_path, model, packing):
    """4 ranks, then 2, then 1, then 2 without sharding, then 4, two of which share the tokens of a sample."""
    common = {"model": model, "packing": packing, "batch_size": 8, "save_every": 1}
    wanted = losses(content(tmp_path, "one", **common, steps=10))
    for steps, (count, mesh) in enumerate([(4, SHARDED), (2, SHARDED), (1, SHARDED), (2, {}), (4, {**SHARDED, "cp": 2})], 1):
        given = content(tmp_path, "many", mesh=mesh, **common, steps=10), 2 * steps if steps < 5 else 0
        found = losses(*given) if count == 1 else on_ranks(count, tmp_path, {"one": given})["one"]
        assert len(found[0]) == 2 * steps
    same(found, wanted)


@pytest.mark.slow
def test_other_settings(tmp_path):
    wanted = losses(content(tmp_path, "one"))
    in_parts = {"batch_size": 2, "accumulate": 3}
    half = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    cases = {
        "offloaded": (content(tmp_path, "offloaded", mesh={**SHARDED, "cpu_offload": True}),),
        "kept": (content(tmp_path, "kept", mesh={**SHARDED, "reshard_after_forward": False}, gradient_checkpointing=True),),
        "in parts": (content(tmp_path, "in parts", mesh=SHARDED, **in_parts),),
        "half": (content(tmp_path, "half", mesh={**SHARDED, **half}),),
        "autocast": (content(tmp_path, "autocast", mesh={**SHARDED, **half}, dtype="bfloat16"),),
    }
    found = on_ranks(2, tmp_path, cases)
    same(found["offloaded"], wanted)
    same(found["kept"], wanted)
    same(found["in parts"], losses(content(tmp_path, "one in parts", **in_parts)))
    for name in ("half", "autocast"):
        assert found[name][0] == pytest.approx(wanted[0], rel=0.05)
        assert all(one.dtype == torch.float32 for one in load(tmp_path / name).state_dict().values())


@pytest.mark.parametrize(
    ("count", "mesh", "message"),
    [
        (
            1,
            {"dp": 4},
            r"train: mesh must be of 1 process, got dp 4 \* cp 1 = 4\. Start torchrun --nproc-per-node 4 .*, or leave out mesh\.dp\.$",
        ),
        (1, {"cp": 2}, r"train: mesh must be of 1 process, got dp 1 \* cp 2 = 2\. Start torchrun .* 2 .*, or leave out mesh\.cp\.$"),
        (4, {"dp": 2, "cp": 3}, r"got dp 2 \* cp 3 = 6\. Start torchrun .* 6 .*, or leave out mesh\.dp and mesh\.cp\.$"),
        (4, {"dp": 2}, r"train: mesh must be of 4 processes, got dp 2 \* cp 1 = 2\. Start torchrun"),
        (4, {}, r"train: training\.batch_size must be a multiple of the 4 ranks of mesh\.dp, got 6\. It counts the samples of all ranks"),
        (2, {"cp": 4}, r"train: mesh must be of 2 processes, got dp 1 \* cp 4 = 4"),
        (2, {"tp": 2}, r"train: mesh must be made of cp, cpu_offload, dp, .*, got 'tp'"),
        (2, {"dp": 0}, r"train: mesh\.dp must be at least 1, got 0"),
        (2, {"param_dtype": "half"}, r"train: mesh\.param_dtype must be float32 or bfloat16, got 'half'"),
    ],
)
def test_settings_that_do_not_fit_the_processes(tmp_path, monkeypatch, count, mesh, message):
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(RangeError, match=message):
        find_ranks(parse(content(tmp_path, "run", mesh=mesh)))


def test_one_process_needs_no_group(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_ranks(parse(content(tmp_path, "run", mesh=SHARDED))) == Ranks(1, 1, 0)


def test_a_sharded_checkpoint_that_is_not_whole_is_named(tmp_path):
    given = parse(content(tmp_path, "run", mesh=SHARDED))
    checkpoint = tmp_path / "run" / "checkpoint-3"
    (checkpoint / "shards").mkdir(parents=True)
    for name in ("trainer_state.json", "scheduler.pt", "rng_state_0.pth"):
        (checkpoint / name).write_text("{}")
    with pytest.raises(RangeError, match=r"a folder of whole checkpoints, got '.*checkpoint-3' without shards/\.metadata\. Remove this"):
        last_checkpoint(given.training, ARCHITECTURES["gla"])


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("rng_state.pth", None),
        ("rng_state_0.pth rng_state_1.pth", None),
        ("", "rng_state.pth"),
        ("rng_state_1.pth rng_state_3.pth", "rng_state_0.pth and rng_state_2.pth"),
    ],
)
def test_states_of_random_numbers_that_are_missing_are_named(tmp_path, written, missing):
    """Any number of ranks continues from a checkpoint of any other; only the same number continues the random numbers."""
    given = parse(content(tmp_path, "run", mesh=SHARDED))
    checkpoint = tmp_path / "run" / "checkpoint-3"
    (checkpoint / "shards").mkdir(parents=True)
    for name in ("trainer_state.json", "scheduler.pt", "shards/.metadata", *written.split()):
        (checkpoint / name).write_text("{}")
    (checkpoint / "config.json").write_text(json.dumps(stored(ARCHITECTURES["gla"])))
    if missing is None:
        assert last_checkpoint(given.training, ARCHITECTURES["gla"]) == checkpoint
        for count in 1, 2, 3:
            names = [of_random(checkpoint, Ranks(count, 1, rank)) for rank in range(count)]
            assert names == (written.split() if count == len(written.split()) else [None] * count)
    else:
        with pytest.raises(RangeError, match=rf"checkpoint-3' without {missing}\. Remove this"):
            last_checkpoint(given.training, ARCHITECTURES["gla"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damaged_parts_of_a_checkpoint_are_named(tmp_path):
    given = content(tmp_path, "run")
    losses(given, stop=3)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    model = load(checkpoint)
    shards.write(checkpoint, model, torch.optim.AdamW(model.parameters()))
    (part,) = (checkpoint / "shards").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(RangeError, match=r"whole checkpoints, got '.*checkpoint-3/shards' \(.+\)\. Remove .* command then begins again\."):
        losses(given)
