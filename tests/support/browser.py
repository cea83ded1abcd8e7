"""Chromium without a window, driven by its DevTools protocol over a pipe."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")


def found():
    """The path of Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page."""

    def __init__(self, to, back):
        self._to, self._back, self._rest, self._ids = to, back, b"", itertools.count(1)
        self._session = None
        self.events = []  # (method, params)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **({"sessionId": self._session} if self._session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._back, 2**20)
                assert piece, "Chromium ended"
                self._rest += piece
            one, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(one)
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script):
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=20):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.05)

    def problems(self):
        """Errors of scripts, violations of the policy, and texts of the console, but not refused requests."""
        logged = [params["entry"] for method, params in self.events if method == "Log.entryAdded"]
        problems = [one["text"] for one in logged if one["source"] != "network"]
        return problems + [
            str(params) for method, params in self.events if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]

    def requests(self):
        """The addresses of all requests."""
        return [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]

    def press(self, key, text="", **more):
        """Press a key."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], **more}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text):
        """Type a text."""
        self.call("Input.insertText", text=text)


@contextmanager
def page():
    """A page of a new Chromium."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _page(folder) as page:
        yield page


@contextmanager
def _page(folder):
    mine, its = os.pipe(), os.pipe()  # it reads 3 and writes 4
    command = ["/bin/sh", "-c", f'exec "$@" 3</dev/fd/{mine[0]} 4>/dev/fd/{its[1]}', "sh", found(), *FLAGS, f"--user-data-dir={folder}"]
    pipes = (mine[0], its[1])
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=pipes, stdout=quiet, stderr=quiet, start_new_session=True)
    os.close(mine[0])
    os.close(its[1])
    try:
        yield Page(mine[1], its[0])
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has several processes, which write to the folder
        process.wait(20)
        os.close(mine[1])
        os.close(its[0])
