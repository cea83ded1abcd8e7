"""Checkpoints by their name on the Hugging Face hub, downloaded if ``--download`` is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import Complaints, MissingExtra, PenstockError, RangeError
from ..models.checkpoints.places import HubName, hub_name, refuse_missing

Download = Annotated[
    bool, typer.Option("--download", help="If the model is OWNER/NAME or OWNER/NAME/FILE on the Hugging Face hub, download it there.")
]
WEIGHTS = (".safetensors", ".bin", ".pth")
"""Suffixes of files of weights; of a repository with several, the first is downloaded."""
OTHERS = (".json", ".txt", ".model", ".jinja")
"""Suffixes of the files beside weights: sizes, tokenizers, templates."""


def checkpoint(function: str, argument: str, path: Path, download: bool) -> Path:
    """The path of an existing checkpoint; for a name on the hub, the path of the downloaded files.

    Raises RangeError for a path without a file or folder, MissingExtra without huggingface_hub, PenstockError if the hub cannot be used.
    """
    name = hub_name(path) if download else None
    if name is None:
        refuse_missing(function, argument, path, "Or add --download.")
        return path
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra(f"{function}: huggingface_hub must be installed, got none. Run pip install huggingface_hub.") from error
    typer.echo(f"{path}: downloading from the Hugging Face hub", err=True)
    try:
        if name.file is not None:
            found = Path(huggingface_hub.hf_hub_download(name.repository, name.file))
        else:
            files = _files(function, argument, name, huggingface_hub.HfApi().list_repo_files(name.repository))
            found = Path(huggingface_hub.snapshot_download(name.repository, allow_patterns=files))
    except PenstockError:
        raise
    except Exception as error:  # also errors of the HTTP package
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PenstockError(f"{function}: {argument} must be a name that the hub has, got {str(path)!r} ({reason}).") from error
    typer.echo(f"{path}: {found}", err=True)
    return found


def _files(function: str, argument: str, name: HubName, files: list[str]) -> list[str]:
    """The files of a repository that make one checkpoint. Raises RangeError for a repository of several, or of none."""
    of_kind = {suffix: [file for file in files if file.endswith(suffix) and "/" not in file] for suffix in WEIGHTS}
    weights = next((found for found in of_kind.values() if found), [])
    complaints = Complaints(function)
    if not weights:
        complaints.add(RangeError, argument, f"a repository with {', '.join(WEIGHTS)} files", repr(name.repository))
    elif weights[0].endswith(".pth") and len(weights) > 1:
        value = f"{name.repository!r} with {len(weights)}: {', '.join(weights[:5])}{', ...' * (len(weights) > 5)}"
        complaints.add(RangeError, argument, "a repository with one .pth file, or one of its files", value, f"Pass {name.repository}/FILE.")
    complaints.raise_any()
    return [*weights, *(file for file in files if file.endswith(OTHERS) and "/" not in file)]
