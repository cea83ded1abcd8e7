"""``penstock serve``: serves a model through OpenAI's HTTP API."""

from __future__ import annotations

import gc
import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..bench.serving.client import KEY_VARIABLE
from ..engine import Engine
from ..errors import Complaints, MissingExtra, RangeError
from ..layers.quantization import KINDS
from ..models import load
from ..models.tokenizers import load_tokenizer
from .download import Download, checkpoint
from .options import DTYPES, Quantize, Threads, check_device, check_names, use_cores
from .tunings import alphas, read, split

if TYPE_CHECKING:
    from ..server.limits import Limits
    from ..server.service import Service

MEBIBYTE = 2**20
MOST_REPLICAS = 1000
REPLICAS = re.compile(r"([1-9][0-9]{0,2})(?:-([1-9][0-9]{0,2}))?", re.ASCII)


def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Option("--model", metavar="PATH", help="Checkpoint: a file or a folder.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is all of the machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests. Default: that of the file or folder.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help=f"Key that requests must have. Default: {KEY_VARIABLE} of the environment, if it is set.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages of this origin may call the server; * is all. Several: give it again."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Requests may name this host, beside this machine's, to a server without a key at a loopback address; * is all. "
            "Several: give it again.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Several keys: lines of NAME KEY, read again by SIGHUP. See docs/server.md."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights. Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    quantize: Quantize = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A tokenizer.json, or another checkpoint. Default: found with the model.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Tuned initial states of RWKV-6 or RWKV-7: of the model itself, or as MODEL:NAME. Several: give it again.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A LoRA, not merged, that requests choose as MODEL:NAME. Several: give it again."),
    ] = None,
    adapter_alpha: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="lora_alpha of an adapter of RWKV-PEFT, whose files do not have it.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template of chats. Default: found with the model; RWKV World has its own.")
    ] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="How answers call tools: hermes, llama or none. Default: as the chat template shows.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How answers mark reasoning: think or none. Default: as the chat template shows.")
    ] = None,
    threads: Threads = None,
    download: Download = False,
    slots: Annotated[int, typer.Option(help="Completions that run together; others wait.", min=1)] = 32,
    token_budget: Annotated[int, typer.Option(help="Tokens of one forward pass at most.", min=1)] = 2048,
    prompt_budget: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompts at most in a forward pass that also has tokens of streams. Default: by the time that passes take.",
            min=64,
        ),
    ] = None,
    pages: Annotated[
        int | None,
        typer.Option(
            help="Of hybrids with softmax attention: pages of 64 tokens that completions and cached prefixes share. "
            "Default: enough for all slots.",
            min=1,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Of hybrids: tokens of a prompt and its completion at most. Default: as the model is configured.", min=1),
    ] = None,
    cache: Annotated[int, typer.Option(help="MiB for states of earlier prompts on the device.", min=0)] = 256,
    host_cache: Annotated[int, typer.Option(help="MiB for states that leave the device.", min=0)] = 0,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="Equal bits whatever runs beside it, at some cost.")] = False,
    max_queue: Annotated[int, typer.Option(help="Completions of a client that may wait; more get status 429.", min=1)] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Generated tokens of a completion at most.", min=1)] = 4096,
    max_prompt: Annotated[int, typer.Option(help="Tokens of a prompt at most.", min=1)] = 131072,
    max_seconds: Annotated[float, typer.Option(help="Time of a request at most, with the wait for a slot.", min=0.1)] = 600,
    max_states: Annotated[int, typer.Option(help="States of completions that are kept for clients.", min=0)] = 64,
    states_folder: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder for these states; servers may share it. Default: a temporary one.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="Form of the log: text or json.")] = "text",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send OpenTelemetry traces there. Default: as its variables of the environment say."),
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="After SIGTERM, requests that run have this long to end.", min=0)] = 25,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="N or LEAST-MOST", help="Processes by Ray Serve, each with a GPU or --threads. LEAST-MOST: as requests come."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Ray cluster of --replicas: HOST:PORT, or auto for that of this machine. Default: started here."
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API: completions and chat, streamed or whole. There is a page to chat at /.

    Ends with SIGTERM or Ctrl-C, after the requests that run. docs/server.md has all fields and limits.

    [bold]Examples[/bold]

      penstock serve --model RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth

      penstock serve --model runs/small --host 0.0.0.0 --port 80 --slots 128

      penstock serve --model runs/small --replicas 2
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    complaints = Complaints("serve")
    count = _check_replicas(complaints, replicas, address, device, states_folder)
    if address is None:
        check_device(complaints, device)
    if dtype is not None:
        check_names(complaints, "dtype", [dtype], DTYPES)
    if quantize is not None:
        check_names(complaints, "quantize", [quantize], KINDS)
    check_names(complaints, "log_format", [log_format], ("text", "json"))
    if api_key_file is not None and api_key is not None:
        complaints.add(RangeError, "api_key", "absent with api_key_file", "both", "Write the key into the file.")
    api_key = os.environ.get(KEY_VARIABLE) if api_key is None and api_key_file is None else api_key
    if api_key == "":
        complaints.add(RangeError, "api_key", "at least one character", "none", "Leave it out to serve without a key.")
    _check_address(complaints, host, port)
    if states_folder is not None:
        _check_folder(complaints, states_folder)
    own_state, states = split(complaints, "state", state or (), plain=True)
    _, adapters = split(complaints, "adapter", adapter or (), plain=False)
    alpha = alphas(complaints, adapter_alpha or (), adapters)
    complaints.raise_any()
    try:
        from ..server.families import CALLS, REASONING
        from ..server.hosts import HOSTS
        from ..server.keys import Keys
        from ..server.limits import Limits
        from ..server.origins import ORIGINS
        from ..server.requestlog import LogFormat
        from ..server.run import make_server
        from ..server.tracing import Tracing
    except ImportError as error:
        raise MissingExtra.of("serve", "fastapi, uvicorn, jinja2 and prometheus-client", "serve") from error
    for option, value, names in ("tool_parser", tool_parser, CALLS), ("reasoning_parser", reasoning_parser, REASONING):
        if value is not None:
            check_names(complaints, option, [value], [*names, "none"])
    complaints.raise_any()
    ORIGINS.check("serve", allow_origin or ())
    HOSTS.check("serve", allow_host or ())
    keys = Keys.read(api_key_file) if api_key_file is not None else None if api_key is None else Keys.single(api_key)
    form: LogFormat = "json" if log_format == "json" else "text"
    limits = Limits(max_tokens=max_tokens, prompt_tokens=max_prompt, seconds=max_seconds, states=max_states)
    make = partial(
        make_service, model=model, download=download, name=name, tokenizer=tokenizer, chat_template=chat_template,
        tool_parser=tool_parser, reasoning_parser=reasoning_parser, dtype=dtype, device=device, own_state=own_state, states=states,
        adapters=adapters, alpha=alpha, limits=limits, quantize=quantize,
        settings={
            "slots": slots, "token_budget": token_budget, "prompt_budget": prompt_budget, "cache_bytes": cache * MEBIBYTE,
            "host_cache_bytes": host_cache * MEBIBYTE, "max_queue": max_queue, "batch_invariant": batch_invariant,
            "pages": pages, "max_length": max_length,
        },
    )  # fmt: skip
    shared: dict[str, Any] = {
        "keys": keys, "origins": allow_origin or (), "hosts": allow_host or (), "drain_seconds": drain_seconds, "log_format": form,
    }  # fmt: skip
    if count is None:
        tracing = Tracing.configured(otlp_endpoint)
        make = partial(make, cores=partial(use_cores, context, threads, device))
        make_server(make(states_folder=states_folder), host, port, tracing=tracing, **shared).run()
        return
    from ..server import cluster

    if address is None:
        checkpoint("serve", "model", model, download)  # an error at once, not from a replica
    each = threads or max(1, (os.cpu_count() or 1) // count[1])
    plan = cluster.Plan(*count, gpu=device != "cpu", threads=each, address=address)
    with ExitStack() as left:
        folder = states_folder or Path(left.enter_context(TemporaryDirectory(prefix="penstock-states-")))
        make = partial(make, states_folder=folder.resolve(), cores=partial(torch.set_num_threads, each), folder=Path.cwd())
        server, running = cluster.make_server(
            make, plan, host, port, name=name or model.name, slots=slots, max_queue=max_queue, otlp_endpoint=otlp_endpoint, **shared
        )
        left.callback(running.close)
        with suppress(SystemExit, KeyboardInterrupt):  # Ray's and Python's own ways to end by a signal, after the server's
            server.run()
    os._exit(0)  # threads of Ray need five seconds more, after all is done


def make_service(
    *, model: Path, download: bool, name: str | None, tokenizer: Path | None, chat_template: Path | None, tool_parser: str | None,
    reasoning_parser: str | None, dtype: str | None, device: str, own_state: str | None, states: dict[str, str],
    adapters: dict[str, str], alpha: dict[str, float], limits: Limits, settings: dict[str, Any], states_folder: Path | None,
    cores: Callable[[], object], quantize: str | None = None, folder: Path | None = None,
) -> Service:  # fmt: skip
    """The service of one process, ready for requests; or of a replica, which finds files below ``folder``. ``cores`` sets the threads."""
    from ..server.memory import keep_flat
    from ..server.service import Service
    from ..server.templates import find_template, with_markers
    from ..server.workers import take_short_turns

    keep_flat()
    take_short_turns()
    if folder is not None and folder.is_dir():
        os.chdir(folder)
    model = checkpoint("serve", "model", given := model, download)
    coder = load_tokenizer(tokenizer or model)
    cores()
    template = find_template(model, coder, chat_template, tool_parser, reasoning_parser)
    kind = DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]
    weights = load(model, dtype=kind, device=device, state=own_state, quantize=quantize)  # type: ignore[arg-type]
    engine = Engine(weights.eval(), with_markers(coder, template), **settings, **read(model, states, adapters, alpha))
    engine.warm_up()
    service = Service(engine, name or (given.resolve().name if model.is_dir() else given.stem), template, limits, states_folder)
    service.processes.start()
    gc.collect()
    gc.freeze()  # the model and all packages: a garbage collection over them would stop all answers for a fifth of a second
    return service


def _check_replicas(
    complaints: Complaints, replicas: str | None, address: str | None, device: str, states_folder: Path | None
) -> tuple[int, int] | None:  # fmt: skip
    """The least and the most replicas; None for one process without Ray."""
    if replicas is None:
        if address is not None:
            complaints.add(RangeError, "address", "absent without replicas", repr(address), "Give --replicas, too.")
        return None
    match = REPLICAS.fullmatch(replicas)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        rule = f"a number from 1, or two such as 1-4, the least and the most, at most {MOST_REPLICAS - 1}"
        complaints.add(RangeError, "replicas", rule, repr(replicas))
    if device == "cuda" and address is None and most > torch.cuda.device_count():
        complaints.add(RangeError, "replicas", f"at most {torch.cuda.device_count()}, the GPUs of this machine", repr(replicas))
    if device.startswith("cuda:"):
        complaints.add(RangeError, "device", "cpu or cuda with replicas", repr(device), "Ray gives each replica a GPU.")
    if address is not None and address.startswith("ray://"):
        remedy = "Ray's client cannot reach the replicas: start the server on a machine of the cluster."
        complaints.add(RangeError, "address", "auto, or HOST:PORT of the cluster", repr(address), remedy)
    if address is not None and states_folder is None:
        complaints.add(
            RangeError, "states_folder", "a folder that all machines share with address", "none", "Give it with --states-folder."
        )
    return least, most


def _check_address(complaints: Complaints, host: str, port: int) -> None:
    """Check that the server can listen there, before the weights are read."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        got = f"{host}:{port} ({error})"
        complaints.add(RangeError, "host and port", "free on this machine", got, "Give others with --host and --port.")


def _check_folder(complaints: Complaints, folder: Path) -> None:
    """Make the folder of states if there is none, and check that it can be written. A new one is for this user only: states have texts."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        complaints.add(RangeError, "states_folder", "a folder that can be written", f"{str(folder)!r} ({error.strerror})")
