"""Web pages of other origins that may call the server (CORS)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .patterns import Pattern

ORIGINS = Pattern(
    "allow_origin",
    re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+"),
    "an origin such as https://example.org or http://localhost:5173, in small letters and without a path, or *",
)
"""What browsers send as an origin: other texts would never be equal to one."""
RATES = [f"X-RateLimit-{what}-{of}" for what in ("Limit", "Remaining", "Reset") for of in ("Requests", "Tokens")]
EXPOSED = ("X-Request-Id", "Retry-After", *RATES)
"""Headers of answers that pages may read."""


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Answer preflight requests of these origins, and let their pages read answers, errors too. Add it after what answers requests."""
    app.add_middleware(CORSMiddleware, **rules(origins))


def rules(origins: Sequence[str]) -> dict[str, Any]:
    """Arguments of Starlette's ``CORSMiddleware``.

    Credentials are not allowed: a page needs the server's key itself, since the server has no cookies.
    """
    methods = ["GET", "HEAD", "POST", "DELETE"]
    return {"allow_origins": list(origins), "allow_methods": methods, "allow_headers": ["*"], "expose_headers": list(EXPOSED)}
