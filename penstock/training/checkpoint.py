"""Loading and saving of a trained model."""

from __future__ import annotations

from pathlib import Path

import torch

from ..models import CausalLM, Config


def load(path: Path, *, dtype: torch.dtype | None = None, device: str | None = None) -> CausalLM:
    """The model in a folder that ``save`` wrote."""
    content = torch.load(path / "model.pth", map_location=device, weights_only=True)
    with torch.device("meta"):
        model = CausalLM(Config.from_dict(content["config"]))
    model.load_state_dict(content["weights"], assign=True)
    model.tie()
    return model.to(dtype=dtype)


def save(model: CausalLM, path: Path) -> None:
    """Write the configuration and the weights into a folder."""
    path.mkdir(parents=True, exist_ok=True)
    torch.save({"config": model.config.to_dict(), "weights": model.state_dict()}, path / "model.pth")
