"""``penstock serve``: a server from a checkpoint, in a process of its own; and ``penstock bench-serve`` on it."""

import json
import signal
import socket
import sys
import threading
import time

import httpx
import openai
import pytest
from live_server import process, running, save_checkpoint, small_model
from typer.testing import CliRunner

from penstock.cli import main
from penstock.errors import installing


def run(*words):
    return CliRunner().invoke(main, list(words))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    save_checkpoint(folder)
    return folder


@pytest.fixture
def served(checkpoint):
    with process(checkpoint, "--slots", "4", "--api-key", "secret", "--quantize", "int8") as served:
        yield served


def test_a_server_answers_is_measured_and_ends_after_its_requests(served, tmp_path):
    server, url, lines = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    assert client.models.list().data[0].id == "small"
    answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "abc"}], max_tokens=4)
    assert answer.usage.prompt_tokens == 3
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}

    numbers, picture = tmp_path / "a" / "numbers.json", tmp_path / "picture.svg"
    words = ["--clients", "4", "--rate", "50", "--requests", "10", "--prefix", "64", "--prompt", "5-9", "--output", "3"]
    done = run("bench-serve", "--url", url, "--api-key", "secret", *words, "--json", str(numbers), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert "4 clients" in done.output
    assert "50 a second" in done.output
    content = json.loads(numbers.read_text())
    for one in content["runs"]:
        assert (one["requests"], one["output_tokens"], one["failed"]) == (10, 30, {})
        assert one["first"]["p50"] <= one["first"]["p99"] <= one["whole"]["p99"]
        assert 0 < one["cached_tokens"] < one["prompt_tokens"]
    assert b"Throughput" in picture.read_bytes() or picture.stat().st_size > 1000

    counts = []

    def request():
        stream = client.completions.create(
            model="small", prompt="a", max_tokens=200, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
        counts.append(list(stream)[-1].usage.completion_tokens)

    threads = [threading.Thread(target=request) for _ in range(8)]
    for one in threads:
        one.start()
    for _ in range(1000):
        values = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#"))
        if float(values["penstock_running"]) == 4:
            break
        time.sleep(0.01)
    server.send_signal(signal.SIGTERM)
    for one in threads:
        one.join()
    assert counts == [200] * 8
    assert server.wait(30) in (0, -signal.SIGTERM)
    assert not any("Traceback" in line or "ERROR" in line for line in lines), lines
    client.close()


@pytest.mark.parametrize(("words", "got"), [([], "none"), (["--api-key", "wrong"], "another one")])
def test_a_server_that_wants_a_key_is_told_from_no_server(words, got, monkeypatch):
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    with running(small_model(), api_key="secret") as live:
        done = run("bench-serve", "--url", live.url, *words)
        assert done.exit_code == 2
        said = f"bench-serve: api_key must be one that {live.url} takes, got {got} (status 401: "
        assert said in done.stderr, done.stderr
        assert "Pass --api-key KEY, or set PENSTOCK_API_KEY in the environment." in done.stderr
        monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
        assert run("bench-serve", "--url", live.url, "--clients", "1", "--requests", "1", "--prompt", "3", "--output", "1").exit_code == 0


def test_wrong_options_are_refused(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "--model", str(checkpoint), "--port", port)
        assert done.exit_code == 2
        assert f"host and port must be free on this machine, got 127.0.0.1:{port}" in " ".join(done.output.split())
    for words, message in (
        (["--host", "no.such.host.invalid"], "host and port must be free on this machine"),
        (["--device", "none"], "device must be"),
        (["--dtype", "int8"], "dtype must be"),
        (["--quantize", "fp8"], "quantize must be one of int8, int4, got 'fp8'"),
        (["--api-key", ""], "api_key must be at least one character"),
        (["--allow-origin", "localhost:5173"], "allow_origin must be an origin such as https://example.org"),
        (["--allow-host", "example.org:80"], "allow_host must be a name such as example.org"),
        (["--state", str(tmp_path / "none.pth")], "state must be an existing file or folder"),
        (["--chat-template", str(tmp_path / "none")], "chat_template must be a text file"),
        (["--states-folder", str(checkpoint / "config.json")], "states_folder must be a folder that can be written"),
        (["--slots", "9", "--token-budget", "70"], "token_budget must be at least slots + 64"),
        (["--replicas", "0"], "replicas must be a number from 1, or two such as 1-4, the least and the most, at most 999, got '0'"),
        (["--replicas", "3-2"], "replicas must be a number from 1"),
        (
            ["--replicas", "2", "--device", "cuda:1"],
            "device must be cpu or cuda with replicas, got 'cuda:1'. Ray gives each replica a GPU.",
        ),
        (["--replicas", "2", "--address", "ray://a:1"], "address must be auto, or HOST:PORT of the cluster, got 'ray://a:1'. Ray's client"),
        (["--address", "auto"], "address must be absent without replicas, got 'auto'."),
        (["--replicas", "2", "--address", "auto"], "states_folder must be a folder that all machines share with address, got none."),
    ):
        done = run("serve", "--model", str(checkpoint), *words)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())


def test_replicas_without_ray_name_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("serve", "--model", str(checkpoint), "--device", "cpu", "--port", "0", "--replicas", "2")
    assert done.exit_code == 2
    assert f"serve: ray[serve] must be installed, got none. Run {installing('ray')}." in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clients", "0"], "clients must be from 1 to 4096, got 0"),
        (["--rate", "0"], "rate must be above 0"),
        (["--requests", "0"], "requests must be at least 1"),
        (["--prompt", "9-5"], "prompt must be a number from 1"),
        (["--output", "exp:5-9"], "output must be a number from 1"),
        (["--url", "ftp://a"], "url must be http://"),
        (["--url", "http://127.0.0.1:1"], "url must be of a server of OpenAI's API, got 'http://127.0.0.1:1' ([Errno"),
        (["--url", "http://127.0.0.1:1"], "Start one: penstock serve --model PATH."),
        (["--plot", "a.txt"], "file must be named *.png"),
    ],
)
def test_wrong_options_of_the_load_are_refused(words, message):
    done = run("bench-serve", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
