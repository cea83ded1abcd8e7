"""Cores, quotas of containers and load, read from copies of the files of Linux."""

import pytest
import torch

from penstock import cores
from penstock.cores import default_threads, load, quota


def system(folder, group, **limits):
    """Files of Linux below a folder; ``limits`` are file contents by path below sys/fs/cgroup, with __ for /."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(group)
    for path, content in limits.items():
        file = folder / "sys/fs/cgroup" / path.replace("__", "/").replace("_max", ".max").replace("cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


V1 = "4:cpu,cpuacct:/docker/1234\n3:cpuset:/\n0::/\n"
CASES = {
    "version 2, in a container": ("0::/\n", {"cpu_max": "150000 100000\n"}, 1.5),
    "version 2, a service": ("0::/system.slice/a.service\n", {"system.slice__a.service__cpu_max": "400000 100000"}, 4),
    "version 2, a group above": ("0::/pod/inner\n", {"pod__cpu_max": "200000 100000", "pod__inner__cpu_max": "max 100000"}, 2),
    "version 2, no limit": ("0::/\n", {"cpu_max": "max 100000\n"}, None),
    "version 2, above the namespace": ("0::/../../other\n", {"cpu_max": "300000 100000\n"}, 3),
    "version 1, in a container": (V1, {"cpu__cfs_quota_us": "250000\n", "cpu__cfs_period_us": "100000\n"}, 2.5),
    "version 1, on the host": (
        V1, {"cpu,cpuacct__docker__1234__cfs_quota_us": "50000", "cpu,cpuacct__docker__1234__cfs_period_us": "100000"}, 0.5
    ),
    "version 1, no limit": (V1, {"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}, None),
    "damaged": ("nonsense\n0::/\n", {"cpu_max": "a lot"}, None),
    "no control groups": ("", {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_quota_is_that_of_the_control_groups(case, tmp_path):
    group, limits, wanted = CASES[case]
    assert quota(system(tmp_path, group, **limits)) == wanted


def test_without_proc_there_is_no_quota(tmp_path):
    assert quota(tmp_path) is None


@pytest.mark.parametrize(("allowed", "threads"), [(50_000, 1), (100_000, 1), (150_000, 2), (300_000, 3), (6_400_000, 4)])
def test_threads_follow_the_quota(tmp_path, monkeypatch, allowed, threads):
    for name in cores.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    place = system(tmp_path, "0::/\n", cpu_max=f"{allowed} 100000")
    assert default_threads(place) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert default_threads(place) == 4


def test_the_load_is_of_the_cores_of_this_process(tmp_path, monkeypatch):
    """The other cores of the machine are busy."""
    monkeypatch.setattr(cores, "affinity", lambda: frozenset({1, 2}))
    ticks = iter([0, 20])

    def later(_):
        return next(ticks)

    def stat(busy):
        rows = [f"cpu{n} {busy if n in (0, 1, 11) else 0} 0 0 {0 if n in (0, 1, 11) else busy} 0 0 0 0 0 0" for n in range(12)]
        (tmp_path / "proc/stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 0 0", *rows, "intr 5"]))

    (tmp_path / "proc").mkdir()
    stat(0)
    monkeypatch.setattr(cores.time, "sleep", lambda _: stat(20))
    assert load(tmp_path) == 1.0
