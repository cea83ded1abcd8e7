"""``penstock convert``: a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import Complaints, RangeError
from ..models.checkpoints import NAMES, load, save
from ..models.checkpoints.writing import check_file, check_folder, copy_beside
from .download import Download, checkpoint
from .options import DTYPES, State, check_names
from .outputs import Folder, check_outputs

STORED = "as stored"
FLAG = "replace it with --overwrite"
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "rwkv_vocab_v20230424.txt", "chat_template.jinja"),
)
"""Files of a folder that are copied as they are."""
TEMPLATES = "additional_chat_templates"
"""A folder of such files."""


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="File or folder of a checkpoint. Its format is recognised.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; with --to blinkdl a file.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help=f"Format to write: {', '.join(NAMES)}.")] = "penstock",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.", show_default=STORED)] = STORED,
    state: State = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Adapter to merge: a file of RWKV-PEFT (LoRA, PiSSA, Bone, DiSHA) or PEFT's folder.")
    ] = None,
    adapter_alpha: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="lora_alpha of the training of a LoRA file of RWKV-PEFT.")
    ] = None,
    adapter_init: Annotated[
        Path | None, typer.Option(metavar="FILE", help="init_pissa.pth of RWKV-PEFT, for an adapter that is a PiSSA.")
    ] = None,
    download: Download = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there already.")] = False,
) -> None:
    """Convert a checkpoint to another format.

    Reads BlinkDL's RWKV files (5.0, 5.1, 5.2, 6, 7), the Hugging Face layouts of RWKV-5, RWKV-6 and Mamba-2, state-spaces' Mamba-2, fla's
    GLA, RetNet, DeltaNet, gated DeltaNet, KDA, RWKV-6 and RWKV-7, llama.cpp's GGUF files of RWKV-6 and RWKV-7, and Penstock's own folders.
    Weights keep their bits unless --dtype is given. Tokenizers and chat templates are copied; those of DST stay unless --overwrite is
    given.

    Formats to write: penstock for every model; blinkdl for RWKV; hf for RWKV-5.2, RWKV-6 and Mamba-2; fla for GLA, RetNet,
    DeltaNet, gated DeltaNet, KDA, RWKV-6 and RWKV-7.

    [bold]Examples[/bold]

      penstock convert RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth rwkv6-1b6

      penstock convert gla-1.3B-100B gla-half --dtype bfloat16

      penstock convert rwkv6-1b6 rwkv6-1b6.pth --to blinkdl

      penstock convert base.pth tuned --adapter rwkv-9.pth --adapter-alpha 32
    """
    complaints = Complaints("convert")
    check_names(complaints, "to", [to], NAMES)
    if dtype != STORED:
        check_names(complaints, "dtype", [dtype], DTYPES)
    if source.resolve() == target.resolve():
        complaints.add(RangeError, "DST", "apart from SRC", repr(str(target)), "Name another one.")
    complaints.raise_any()
    source = checkpoint("convert", "SRC", source, download)
    if to == "blinkdl":
        check_outputs("convert", {"DST": target})
        check_file(complaints, "DST", target, overwrite, FLAG)
    else:
        check_outputs("convert", {}, Folder("DST", target, ("config.json", "model.safetensors")))
        check_folder(complaints, "DST", target, overwrite, FLAG)
    complaints.raise_any()
    model = load(
        source, dtype=DTYPES.get(dtype), state=state, adapter=adapter, adapter_alpha=adapter_alpha, adapter_init=adapter_init
    )  # fmt: skip
    save(model, target, to, overwrite=overwrite)
    names = [*TOKENIZERS, *(f"{TEMPLATES}/{one.name}" for one in sorted((source / TEMPLATES).glob("*.jinja")))]
    copied = copy_beside(source, target, names, overwrite) if source.is_dir() and target.is_dir() else []
    sizes = {name: getattr(model.config, name) for name in ("num_layers", "hidden_size", "vocab_size")}
    kinds = ", ".join(dict.fromkeys(one.kind for one in model.config.mixers))
    weights = list(model.parameters())
    dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in weights}))
    typer.echo(f"{target}: {kinds}, {', '.join(f'{name} {size}' for name, size in sizes.items())}")
    typer.echo(f"{sum(x.numel() for x in weights):,} weights, {dtypes}")
    if copied:
        typer.echo(f"copied {', '.join(copied)}")
