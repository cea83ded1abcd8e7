"""Worker processes of large requests: results and errors, what ends them, and their end."""

import asyncio
import json
import logging
import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from live_server import process, running, save_checkpoint
from tokenizer_files import TOKENIZERS, tokenizer_of

from penstock.errors import RangeError
from penstock.models.tokenizers import Bytes
from penstock.server import limits, processes
from penstock.server.caller import Caller, enter
from penstock.server.errors import Refused
from penstock.server.families import CALLS
from penstock.server.processes import Processes, WorkerError
from penstock.server.protocol import CompletionBody, Message
from penstock.server.templates import JinjaTemplate, WorldTemplate
from penstock.server.texts import Texts, decoded, encoded

TEXT = "the cat and the é\n\n" * 9


@pytest.fixture(scope="module")
def found():
    made = Processes(Texts(Bytes(257), WorldTemplate()))
    yield made
    made.close()


def done(found, function, *given):
    return asyncio.run(found.run(function, *given))


def test_results_come_from_another_process(found):
    assert done(found, os.getpid) != os.getpid()
    assert done(found, sorted, [3, 1, 2]) == [1, 2, 3]
    assert done(found, bytes, b"ab" * 10**6) == b"ab" * 10**6
    assert done(found, os.nice, 0) >= 10


def test_errors_are_those_of_the_function(found):
    with pytest.raises(json.JSONDecodeError, match="Expecting value") as caught:
        done(found, json.loads, "x")
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "Traceback" in str(caught.value.__cause__)
    with pytest.raises(RangeError, match="token must be from 0 to 256, got 999"):
        done(found, decoded, Texts(Bytes(257), None), [999])
    with pytest.raises(Refused, match="tiny must be") as refused:
        done(found, limits._parsed, b'{"model": 1}', CompletionBody, "tiny must be", limits.Limits())
    assert (refused.value.status, refused.value.param) == (400, "model")


def test_refusals_keep_all_that_they_say():
    one = Refused(429, "a", kind="b", param="c", code="d", headers={"e": "f"})
    assert vars(pickle.loads(pickle.dumps(one))) == vars(one)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_workers_have_the_tokenizer(tmp_path, name):
    tokenizer = tokenizer_of(name, tmp_path)
    template = JinjaTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "!"})
    template.calls = CALLS["llama"]
    with_both = Texts(tokenizer, template)
    made = Processes(with_both)
    try:
        tokens = done(made, encoded, with_both, TEXT, True)
        assert [*tokens] == tokenizer.encode(TEXT, True)
        assert done(made, decoded, with_both, tokens) == tokenizer.decode(tokens)
    finally:
        made.close()
    copy = pickle.loads(pickle.dumps(template))
    assert copy.render([Message(role="user", content="a")]) == "a!"
    assert (copy.calls, copy.reasoning) == (CALLS["llama"], None)


def test_a_job_that_ends_its_worker_twice_is_an_error(found, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(Refused, match="a worker process must not end, got 2") as caught:
        done(found, os._exit, 1)
    assert (caught.value.status, caught.value.code) == (500, "worker_ended")
    assert caplog.text.count("a worker process ended during _exit") == 2
    assert done(found, sorted, [2, 1]) == [1, 2]


def test_a_job_whose_worker_is_killed_is_done_by_another_one(found, caplog):
    pids = {done(found, os.getpid) for _ in range(4)}
    killer = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    killer.start()
    with caplog.at_level(logging.WARNING):
        begin = time.monotonic()
        assert done(found, time.sleep, 1) is None
    assert time.monotonic() - begin >= 1.4
    assert caplog.text.count("a worker process ended during sleep") == 1
    assert not pids & {done(found, os.getpid) for _ in range(4)}


def test_another_keeper_takes_the_place_of_one_that_ended(found):
    done(found, os.getpid)
    os.kill(found._keeper._process.pid, signal.SIGKILL)
    found._keeper._process.wait()
    for _ in range(processes.COUNT):
        with pytest.raises(Refused, match="a worker process must not end"):
            done(found, os._exit, 1)
    assert done(found, sorted, [2, 1]) == [1, 2]


def test_memory_is_bounded(found):
    with pytest.raises(Refused, match="must fit into 1024 MiB of a worker's memory") as caught:
        done(found, bytearray, 2**30)
    assert caught.value.status == 400
    assert done(found, len, bytes(2**22)) == 2**22


def test_workers_ignore_signals_of_a_terminal(found):
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        pid = done(found, os.getpid)
        os.kill(pid, one)
        os.kill(found._keeper._process.pid, one)
    assert done(found, sorted, [2, 1]) == [1, 2]


def test_what_cannot_be_pickled_is_done_in_threads(caplog):
    class Own(Bytes):
        pass

    with caplog.at_level(logging.WARNING):
        made = Processes(Texts(Own(), None))
    made.start()
    assert "in threads" in caplog.text
    assert done(made, os.getpid) == os.getpid()
    made.close()


def test_the_end_leaves_nothing(monkeypatch):
    made = Processes(Texts(Bytes(), None))

    async def ended():
        pid = await made.run(os.getpid)
        waits = asyncio.create_task(made.run(time.sleep, 60))
        await asyncio.sleep(0.2)
        made.end(Refused(503, "the end"))
        with pytest.raises(Refused, match="the end"):
            await waits
        made.close()
        return pid

    begin, pid = time.monotonic(), asyncio.run(ended())
    assert time.monotonic() - begin < 50
    assert gone(pid)
    with pytest.raises(Refused, match="the end"):
        done(made, os.getpid)


def gone(pid):
    """Whether a process ends within seconds."""
    for _ in range(500):
        with suppress(OSError):
            if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
                continue
        return True
    return False


def below(pid):
    """The processes that a process started, and those that these did."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *below(child)]
    return found


LONG = {"prompt": "x yz" * 900_000, "return_token_strs": True}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_busy_worker_keeps_no_server_from_its_end(tmp_path, how):
    save_checkpoint(tmp_path)
    with process(tmp_path, "--drain-seconds", "0.1") as (server, url, lines):
        httpx.post(f"{url}/tokenize", json={"prompt": "x" * 2**17}, timeout=100)  # it has started
        statuses = []

        def ask():
            with suppress(httpx.HTTPError):
                statuses.append(httpx.post(f"{url}/tokenize", json=LONG, timeout=100).status_code)

        client = threading.Thread(target=ask)
        client.start()
        started = below(server.pid)
        assert len(started) >= 2
        used = cpu(started)
        while cpu(started) < used + 0.2:  # of a second, more or less
            time.sleep(0.01)
        begin = time.monotonic()
        server.send_signal(how)
        server.wait(30)
        assert time.monotonic() - begin < 2.5 + 2  # and for the load of the machine
        assert all(map(gone, started))
        client.join()
    assert statuses == ([503] if how == signal.SIGTERM else [])
    assert not any("Traceback" in line for line in lines), lines[:50]


def cpu(pids):
    """Seconds that processes have used."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_worker_that_ends_is_an_error_of_its_request_only(model, monkeypatch):
    with running(model) as live:
        body = {"model": "tiny", "prompt": "a" * 2**17, "max_tokens": 1, "temperature": 0}
        wanted = httpx.post(f"{live.url}/v1/completions", json=body, timeout=100).json()["choices"]

        def ended(*_):
            raise EOFError

        monkeypatch.setattr(processes.Worker, "ask", ended)
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=100)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_ended")
        monkeypatch.undo()
        assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=100).json()["choices"] == wanted
        live.settles()


def test_a_client_does_not_get_all_processes(found):
    async def asked(name, *job):
        enter(Caller(address=name))
        return await found.run(*job)

    async def both():
        hogs = [asyncio.create_task(asked("hog", time.sleep, 2)) for _ in range(3)]
        await asyncio.sleep(0.2)
        assert await asked("small", sorted, [2, 1]) == [1, 2]
        assert not any(one.done() for one in hogs)
        await asyncio.gather(*hogs)

    asyncio.run(both())


def test_a_client_does_not_get_all_processes_by_leaving(found):
    async def asked(name, *job):
        enter(Caller(address=name))
        return await found.run(*job)

    async def both():
        for _ in range(3):
            hog = asyncio.create_task(asked("hog", time.sleep, 4))
            await asyncio.sleep(0.2)
            hog.cancel()
        assert await asyncio.wait_for(asked("small", sorted, [2, 1]), 3.5) == [1, 2]
        begin = time.monotonic()
        assert await asked("hog", sorted, [2, 1]) == [1, 2]  # after the first one: the others did not begin
        assert time.monotonic() - begin < 4

    asyncio.run(both())
