"""Blocks of code without >>> run as written: those of the starts with small models in the place of published ones."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from documents import ROOT, blocks

from penstock.models import CausalLM, rwkv6, save

DOCS = ROOT / "docs"
CHECKPOINTS = ("RWKV-x060-World-1B6.pth", "RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth")
LEFT_OUT = re.compile(r"^(pip install|torchrun|penstock doctor)")
"""Commands that change the environment, or need more than a CPU."""


class Session:
    """The blocks of a page in a folder of their own, with servers that run until its end."""

    def __init__(self, folder, stack):
        self.folder, self.stack = folder, stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.python, self.state = [], "ID"
        torch.manual_seed(0)
        model = CausalLM(rwkv6(vocab_size=65536, hidden_size=16, num_layers=1, head_size=8))
        for name in CHECKPOINTS:
            save(model, folder / name, "blinkdl")
        (folder / "docs").mkdir()
        for name in ("README.md", "docs/training.md", "docs/architecture.md", "docs/server.md", "docs/models.md"):
            (folder / name).write_text((ROOT / name).read_text("utf-8")[:4000], "utf-8")
        settings = (DOCS / "small.yaml").read_text("utf-8").replace("steps: 300", "steps: 2").replace("hidden_size: 256", "hidden_size: 64")
        (folder / "docs/small.yaml").write_text(settings, "utf-8")

    def shell(self, text):
        """Run the commands of a block. `penstock` is this one; servers run in the background."""
        text = text.replace("\\\n", " ").replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        for line in text.splitlines():
            if not line or LEFT_OUT.match(line):
                continue
            line = re.sub(r"\bID\b", self.state, line)
            line = re.sub(r"^penstock", f"{sys.executable} -m penstock", line.split("   #")[0])
            if " penstock serve " in line:
                self.serve(line + f" --port {self.port}")
                continue
            line += f" --requests 4 --url http://127.0.0.1:{self.port}" if "bench-serve" in line else ""
            done = subprocess.run(line, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (line, done.stderr[-2000:])
            assert '"error"' not in done.stdout, (line, done.stdout)
            if '"save_state": true' in line:
                self.state = json.loads(done.stdout)["choices"][0]["state"]

    def serve(self, line):
        server = subprocess.Popen(line.split(), cwd=self.folder, env=self.environment, stderr=subprocess.DEVNULL)
        self.stack.callback(server.wait)
        self.stack.callback(server.kill)
        for _ in range(1800):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def run_python(self, text):
        """Run a block: a program of its own if it imports what it needs, else after the first program of its page."""
        self.python.append(text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}"))
        program = self.python[-1:] if text.startswith("import") else [self.python[0], self.python[-1]]
        given = "import json\ndef weather(**_): return 'sun'\n"
        words = [sys.executable, "-W", "ignore", "-c", given + "\n".join(program)]
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (text, done.stderr[-2000:])


def run(page, folder):
    with ExitStack() as stack:
        session = Session(folder, stack)
        for block in blocks("sh", "bash", "python", page=page):
            if ">>>" in block.text or block.text.startswith("for gpu in"):
                continue
            (session.run_python if block.language == "python" else session.shell)(block.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start/kernels", "start/checkpoint", "start/train", "start/serve", "server"])
def test_a_page_runs_as_written(name, tmp_path):
    for needed in ("pyrwkv_tokenizer", "fastapi", "openai", "anthropic", "transformers"):
        pytest.importorskip(needed)
    run(DOCS / f"{name}.md", tmp_path)


def test_the_programs_for_several_devices_run_on_one_process(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=16, hidden_size=16, num_layers=1, head_size=8))
    save(model, tmp_path / "big")
    q, k, v, x = torch.randn(4, 1, 6, 2, 8)
    ids = torch.randint(16, (1, 6))
    names = {"q": q, "k": k, "v": v, "g": -x.abs(), "model": model, "ids": ids, "labels": ids, "offsets": None}
    found = [block.text for block in blocks("python", page=DOCS / "scaling.md") if ">>>" not in block.text]
    for text in found:
        text = text.replace('"cuda"', '"cpu"').replace("torch.distributed.init_process_group()\n", "")
        exec(re.sub(r"torch\.cuda\.set_device.*\n", "", text), names)
    assert len(found) == 3
    assert names["output"].shape == v.shape
    assert names["loss"].isfinite()


def test_the_examples_of_json_and_keys_parse(tmp_path):
    from penstock.server.keys import Keys

    for block in blocks("json", page=DOCS / "server.md"):
        assert json.loads(block.text)["message"] == "request"
    text = next(block.text for block in blocks("text", page=DOCS / "server.md") if block.text.startswith("# NAME KEY"))
    (tmp_path / "keys").write_text(text, "utf-8")
    assert Keys.read(tmp_path / "keys") is not None
