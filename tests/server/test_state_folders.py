"""Folders of states that servers share: what is kept, dropped and listed, and what killed servers leave."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

import httpx
import openai
import pytest
from live_server import VOCAB, running
from state_calls import TEXT, continued, ends, listed, saves

from penstock.engine import Engine, SamplingParams
from penstock.models.tokenizers import Bytes
from penstock.server.errors import Refused
from penstock.server.limits import Limits
from penstock.server.parts import Parts
from penstock.server.states import States


def test_servers_share_a_folder_of_states(model, tmp_path):
    with running(model, states_folder=tmp_path) as one, running(model, states_folder=tmp_path) as other:
        name = saves(one)
        assert listed(other) == [name]
        assert continued(other.client, name).choices[0].text == continued(one.client, name).choices[0].text
        assert httpx.get(ends(other.url, name)).content == httpx.get(ends(one.url, name)).content
        assert httpx.delete(ends(other.url, name)).status_code == 200
        for live in (one, other):
            with pytest.raises(openai.NotFoundError):
                continued(live.client, name)
            assert httpx.delete(ends(live.url, name)).status_code == 404
            assert listed(live) == []
        name = saves(other)
    with running(model, states_folder=tmp_path) as again:
        assert continued(again.client, name).choices[0].text


def test_a_temporary_folder_ends_with_its_server(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running(model) as live:
        saves(live)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert list(tmp_path.iterdir()) == []


def test_servers_of_a_folder_keep_the_last_states_together(model, tmp_path):
    limits = Limits(states=3)
    with running(model, limits, states_folder=tmp_path) as one, running(model, limits, states_folder=tmp_path) as other:
        names = [saves(live) for live in (one, other, one)]
        continued(other.client, names[0])
        names += [saves(other)]
        assert listed(one) == listed(other) == [names[3], names[0], names[2]]
        assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_states_used_within_a_millisecond_keep_their_order(model, tmp_path):
    states = States(Engine(model, Bytes(VOCAB), slots=1, token_budget=256), 3, tmp_path)
    state = states._engine.generate("a", SamplingParams(max_tokens=1, keep_state=True))[0].completions[0].state
    names = [name for _ in range(3) for name in states.add([state])]
    assert [card.id for card in states.cards()] == names[::-1]
    for _ in range(30):
        names = names[1:] + names[:1]
        for name in names:
            states.content(name)
        assert [card.id for card in states.cards()] == names[::-1]


def test_servers_of_a_folder_save_and_drop_states_at_the_same_time(model, tmp_path):
    limits = Limits(states=2)
    with running(model, limits, states_folder=tmp_path) as one, running(model, limits, states_folder=tmp_path) as other:
        errors = []

        def load(live):
            for _ in range(15):
                try:
                    name = saves(live)
                    httpx.get(f"{live.url}/v1/states").raise_for_status()
                    continued(live.client, name)
                except openai.NotFoundError:
                    pass
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=load, args=(live,)) for live in (one, other, one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        saves(one)  # what is saved together may stay together until then
        assert len(listed(one)) == len(list(tmp_path.glob("*.safetensors"))) == 2


def test_states_are_listed_while_another_process_drops_them(model, tmp_path):
    """A file may be gone between any two of the calls that read it."""
    states = States(Engine(model, Bytes(VOCAB), slots=1, token_budget=256), 3, tmp_path)
    params = SamplingParams(max_tokens=1, keep_state=True)
    (name,) = states.add([states._engine.generate("a", params)[0].completions[0].state])
    renames = f"""
import os, time
files = [os.path.join({str(tmp_path)!r}, name) for name in ("{name}.safetensors", "hidden")]
end = time.monotonic() + 2
while time.monotonic() < end:
    os.rename(*files)
    os.rename(*files[::-1])
"""
    with subprocess.Popen([sys.executable, "-c", renames]) as other:
        while other.poll() is None:
            assert len(states.cards()) <= 1
            with suppress(Refused):
                assert states.card(name).tokens == 2
            with suppress(Refused):
                assert states.content(name)
    assert other.returncode == 0
    assert [card.id for card in states.cards()] == [name]


@pytest.mark.parametrize("content", [b"", b"no", b"\2\0\0\0\0\0\0\0{}"])
def test_damaged_files_of_a_folder_are_left_out(model, tmp_path, content):
    with running(model, states_folder=tmp_path) as live:
        damaged = f"state-1-{0:032}"
        (tmp_path / f"{damaged}.safetensors").write_bytes(content)
        name = saves(live)
        assert listed(live) == [name]
        with pytest.raises(openai.BadRequestError, match="load_state") as caught:
            continued(live.client, damaged)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("action", ["removed", "full"])
def test_a_folder_that_takes_no_files_fails_what_needs_it_alone(model, tmp_path, action, monkeypatch):
    folder = tmp_path / "states"
    folder.mkdir()
    with running(model, states_folder=folder) as live:
        name = saves(live)
        if action == "removed":
            shutil.rmtree(folder)
            with pytest.raises(openai.NotFoundError):
                continued(live.client, name)
            assert httpx.get(f"{live.url}/v1/states").status_code == 500
        else:

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(live.service.engine, "save_state", full)
            assert listed(live) == [name]
        found = live.client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, n=2, extra_body={"save_state": True})
        assert len({choice.text for choice in found.choices}) == 2
        for choice in found.choices:  # the completions are finished and paid for
            assert "state" not in choice.model_dump()
            assert choice.state_error["message"].startswith("states: the server's folder must exist and have room, got ")
            assert (choice.state_error["type"], choice.state_error["code"]) == ("server_error", "states_folder")
            assert str(tmp_path) not in str(choice)
        assert live.client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].text
        if action == "removed":  # a folder that is there again takes states again
            folder.mkdir()
            assert continued(live.client, saves(live)).choices[0].text


def others(folder, count, seconds):
    """Files of states whose times are so far ahead."""
    for n in range(count):
        path = folder / f"state-1-{n:032}.safetensors"
        path.write_bytes(b"")
        os.utime(path, times=(time.time() + seconds,) * 2)


@pytest.mark.parametrize("seconds", [0, 3600, 10**9], ids=["now", "an hour ahead", "years ahead"])
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_saved_stays_where_other_files_have_later_times(model, tmp_path, seconds, n):
    with running(model, Limits(states=3), states_folder=tmp_path) as live:
        others(tmp_path, 5, seconds)
        found = live.client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, n=n, extra_body={"save_state": True})
        names = [choice.state for choice in found.choices]
        for name in names:
            assert continued(live.client, name).choices[0].text
        content = httpx.get(ends(live.url, names[0])).content
        others(tmp_path, 5, seconds)
        sent = httpx.post(f"{live.url}/v1/states", content=content).json()["id"]
        assert continued(live.client, sent).choices[0].text
        assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_use_counts_where_other_files_have_later_times(model, tmp_path):
    with running(model, Limits(states=3), states_folder=tmp_path) as live:
        name = saves(live)
        others(tmp_path, 2, 3600)
        continued(live.client, name)
        saves(live), saves(live)
        assert continued(live.client, name).choices[0].text


def test_a_server_with_a_clock_that_is_behind_keeps_what_it_saves(model, tmp_path, monkeypatch):
    limits = Limits(states=2)
    with running(model, limits, states_folder=tmp_path) as one, running(model, limits, states_folder=tmp_path) as other:
        plain = time.time_ns
        for live, hours in ((one, 1), (other, -1), (one, 1), (other, -1), (other, -1)):
            monkeypatch.setattr(time, "time_ns", lambda hours=hours: plain() + hours * 3600 * 10**9)
            assert continued(live.client, saves(live)).choices[0].text


def killed(folder):
    """A folder as a server leaves it that is killed while it writes."""
    place = folder / "penstock-killed.part"
    place.mkdir()
    for name in ("lock", "state-1-0", ".tmp8d2hows", ".state-1-0.mode"):
        (place / name).write_bytes(b"a")
    (folder / "state-1-0.part").write_bytes(b"a")


def test_what_killed_servers_did_not_finish_is_removed_and_what_others_write_stays(model, tmp_path, monkeypatch):
    with running(model, states_folder=tmp_path) as live:
        saves(live)  # its place is there from now on
        killed(tmp_path)
        plain, writes, goes_on = live.engine.save_state, threading.Event(), threading.Event()

        def slow(state, path):
            path.write_bytes(b"half")
            writes.set()
            assert goes_on.wait(60)
            plain(state, path)

        monkeypatch.setattr(live.engine, "save_state", slow)
        results = []
        writer = threading.Thread(target=lambda: results.append(saves(live)))
        writer.start()
        assert writes.wait(60)
        with running(model, states_folder=tmp_path) as other:
            (part,) = tmp_path.glob("*.part")
            assert {path.read_bytes() for path in part.iterdir()} == {b"", b"half"}
            goes_on.set()
            writer.join()
            assert continued(other.client, results[0]).choices[0].text
    assert len(list(tmp_path.iterdir())) == 2  # states: no parts of servers that ended


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    place = tmp_path / "folder"
    place.mkdir()
    code = f"""
import os, pathlib, signal
from penstock.server.parts import Parts
parts = Parts(pathlib.Path({str(place)!r}))
parts.path("a").write_bytes(b"a")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert len(list(place.rglob("*"))) == 3
    Parts(place).remove_left()
    assert list(place.iterdir()) == []
