"""Serves a trained model for a moment, and asks it one question over HTTP with OpenAI's client."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ..errors import MissingExtra, PenstockError

PACKAGES = ("fastapi", "uvicorn", "jinja2", "prometheus_client", "openai")
START_SECONDS = 60.0
"""Time for the server to start: it imports torch."""


class Answer(NamedTuple):
    """One answered request."""

    url: str
    text: str
    """The continuation of the prompt by the model."""
    prompt_tokens: int
    completion_tokens: int


def ask(weights: Path, prompt: str, tokens: int = 80) -> Answer:
    """Start ``penstock serve`` on a free port in a process of its own, complete ``prompt`` and stop it.

    weights : Path
        A checkpoint.
    prompt : str
    tokens : int
        To generate at most.

    Raises MissingExtra without the packages of the extra ``demo``, or PenstockError if the server does not start.
    """
    if any(find_spec(name) is None for name in PACKAGES):
        raise MissingExtra.of("demo", "fastapi, uvicorn, jinja2, prometheus-client and openai", "demo")
    import openai

    with _served(weights) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)
        model = client.models.list().data[0].id
        found = client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0.7, top_p=0.95, seed=0)
    assert found.usage is not None  # answers that are not streamed have it
    return Answer(url, found.choices[0].text, found.usage.prompt_tokens, found.usage.completion_tokens)


@contextmanager
def _served(weights: Path) -> Iterator[str]:
    """The address of a server that runs inside."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", str(weights), "--port", "0", "--slots", "4", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        lines: list[str] = []
        address: list[str] = []
        ready = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if not address and (found := re.search(r"running on (http://\S+)", line)):
                    address.append(found[1])
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            if not ready.wait(START_SECONDS) or not address:
                raise PenstockError(f"demo: the server did not start. It said: {''.join(lines[-5:]).strip() or 'nothing'}")
            yield address[0]
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()
