"""The files of the page to chat at."""

from pathlib import Path

PAGE = Path(__file__).parent / "page"
MEDIA = {".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
PATHS = {"/": ("index.html", "text/html")} | {
    f"/{path.name}": (path.name, MEDIA[path.suffix]) for path in sorted(PAGE.iterdir()) if path.suffix in MEDIA
}
"""What each path serves: the name of a file and its type."""
