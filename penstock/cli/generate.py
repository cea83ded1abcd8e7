"""``penstock generate``: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from ..errors import Complaints, RangeError
from ..files import read_text
from ..layers.quantization import KINDS
from ..models import load
from ..models.sampling import check_sampling
from ..models.streaming import stream
from ..models.tokenizers import Tokenizer, ends_of, load_tokenizer
from .download import Download, checkpoint
from .options import DTYPES, Quantize, State, Threads, check_device, check_names, check_seed, use_cores

INTERRUPTED = 130
"""The exit code that shells give to a program that ends by Ctrl-C."""


def generate(
    context: typer.Context,
    model: Annotated[Path, typer.Option("--model", metavar="PATH", help="Checkpoint: a file or a folder.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the text to continue; - is standard input.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--tokens", metavar="N", help="Tokens to generate at most. --tokens is the same.", min=0)
    ] = 200,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of most likely tokens whose probabilities sum to this.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples. Default: another one each time.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights. Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A tokenizer.json, or another checkpoint. Default: found with the model.")
    ] = None,
    state: State = None,
    quantize: Quantize = None,
    threads: Threads = None,
    download: Download = False,
) -> None:
    """Continue a text. Prints each character as soon as it is complete, and ends at the model's end of text.

    [bold]Examples[/bold]

      penstock generate --model RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth --prompt "The sea"

      cat question.txt | penstock generate --model runs/small --prompt-file - --temperature 0
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    complaints = Complaints("generate")
    if (prompt is None) == (prompt_file is None):
        complaints.add(RangeError, "prompt", "given by --prompt or by --prompt-file", "neither" if prompt is None else "both")
    check_device(complaints, device)
    check_sampling(complaints, temperature, top_p, None, torch.device("cpu"))
    if seed is not None:
        check_seed(complaints, seed)
    if dtype is not None:
        check_names(complaints, "dtype", [dtype], DTYPES)
    if quantize is not None:
        check_names(complaints, "quantize", [quantize], KINDS)
    complaints.raise_any()
    text = prompt if prompt is not None else read_text(prompt_file or Path("-"), "generate", "prompt_file")
    model = checkpoint("generate", "model", model, download)
    coder = load_tokenizer(tokenizer or model)
    given = _prompt(text, coder)
    use_cores(context, threads, device)
    kind = DTYPES[dtype or ("float32" if device == "cpu" else "bfloat16")]
    weights = load(model, dtype=kind, device=device, state=state, quantize=quantize)  # type: ignore[arg-type]
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    decoder, count, begin = coder.stream(given), 0, perf_counter()
    found = stream(
        weights,
        given,
        max_tokens,
        temperature=temperature,
        top_p=top_p,
        end=ends_of(coder),
        vocab_size=coder.vocab_size,
        generator=generator,
    )
    interrupted = False
    try:
        for token in found:
            count += 1
            typer.echo(decoder.push(token), nl=False)
    except KeyboardInterrupt:
        interrupted = True
    seconds = perf_counter() - begin
    typer.echo(decoder.finish())
    typer.echo(f"{len(given)} tokens read, {count} generated in {seconds:.2f} s", err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens to begin with: those of the text, or the token between texts if it is empty."""
    found = tokenizer.encode(text, special=True)
    if not found and tokenizer.end_of_text is not None:
        found = [tokenizer.end_of_text]
    if not found:
        complaints = Complaints("generate")
        complaints.add(RangeError, "prompt", "a text of at least one token", repr(text), "This tokenizer has no token that begins a text.")
        complaints.raise_any()
    return found
