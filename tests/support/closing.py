"""A last token that decays the whole state, and neither writes nor erases: what is left is tiny, and as exact as any other state."""

import torch
from cases import Case

DECAYS = (-8.0, -12.0, -18.0, -40.0)
MOST = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}


def closed(case: Case, decay: float) -> dict:
    """The case's tensors with such a last token."""
    tensors = {name: x if x is None else x.clone() for name, x in case.tensors().items()}
    tensors["g"][:, -1] = decay
    tensors["v"][:, -1] = 0
    for name in ("beta", "b"):
        if tensors.get(name) is not None:
            tensors[name][:, -1] = 0
    return tensors


def error(case: Case, tensors: dict, found: torch.Tensor) -> float:
    """The error of a final state relative to its norm."""
    wanted = case.call({name: x if x is None else x.double().cpu() for name, x in tensors.items()}, "reference").final_state
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def check_closing(case: Case, impl: str, device: str = "cpu") -> None:
    for decay in DECAYS:
        tensors = closed(case, decay)
        given = {name: x if x is None else x.to(device) for name, x in tensors.items()}
        off = error(case, tensors, case.call(given, impl).final_state)
        assert off <= MOST[case.dtype], (decay, off)
