"""``penstock doctor``: what this machine has, which implementations run here, and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ..errors import installing
from ..verify.doctor import Diagnosis


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all answers, and the summary.")] = False) -> None:
    """Show what this machine has, which implementations run here and why not others, and what is missing.

    Of each family of functions and each device: the implementation that impl="auto" takes for a call of 64 tokens with gradients, in
    float32 on the CPU and bfloat16 on GPUs. Nothing is computed or compiled. The last paragraph is a summary for reports.

    [bold]Examples[/bold]

      penstock doctor

      penstock doctor --json > doctor.json
    """
    found = Diagnosis.here()
    typer.echo(json.dumps(asdict(found) | {"summary": found.paragraph}, indent=2) if as_json else _text(found))


def _text(found: Diagnosis) -> str:
    lines = ["Machine", *(f"  {name}: {value}" for name, value in found.machine.lines() if not name.startswith("impl "))]
    lines.append(f"  torch is built for: {found.build}")
    lines.append(f"  NVIDIA driver: {found.driver or 'not found'}")
    lines.append(f"  C compiler: {found.compiler or 'not found. Triton needs one for its launchers: install gcc, or set CC.'}")
    lines += ["", 'Implementations that impl="auto" takes']
    for one in found.taken:
        lines.append(f"  {one.device}, {one.dtype}: {', '.join(one.functions)}")
        lines.append(f"    forward {one.forward or 'none'}, backward {one.backward or 'none'}")
        lines += [f"    forms {', '.join(one.forms)}"] if one.forms else []
        lines += [f"    not {name}: {reason}" for name, reason in one.refused]
    lines += ["", "Extras"]
    for extra in found.extras:
        state = f"without {', '.join(extra.missing)}" if extra.missing else "complete"
        lines.append(f"  {extra.name}: {state}")
    lines += [f"  To install one: {installing('EXTRA')}"] if any(extra.missing for extra in found.extras) else []
    return "\n".join([*lines, "", "Summary", found.paragraph])
