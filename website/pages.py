"""MkDocs' hooks: pages from files outside of docs/, links to them, examples with >>> as sessions of Python, the search without a server."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from website.reference import command_page, fla_page

ROOT = Path(__file__).parents[1]
PAGES = {
    "benchmarks/NOTES.md": "notes.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
    "README.md": "index.md", "examples": "examples/index.md",
}  # fmt: skip
"""Files and folders outside of docs/, and their pages. Missing ones are skipped."""
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]*)(#[^)\s]*)?(?=\))")
SESSION = re.compile(r"^```python\n(?=>>>)", re.MULTILINE)


def examples() -> dict[str, Path]:
    """The programs of examples/, by their pages."""
    return {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.py"))}


def on_config(config: Any) -> Any:
    """Put the pages of examples into the navigation."""
    next(one["Examples"] for one in config.nav if "Examples" in one).extend(examples())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, uri in PAGES.items():
        if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    for uri, path in examples().items():
        files.append(File.generated(config, uri, content=example_page(path)))
    files.append(File.generated(config, "reference/cli.md", content=command_page()))
    files.append(File.generated(config, "reference/fla.md", content=fla_page()))
    return files


@event_priority(-100)
def on_post_build(config: Any) -> None:
    """Write the index of the search, which exists by now, as a script too: pages from file:// may load those only."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text('utf-8')}", "utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files outside of docs/, and mark sessions of Python."""
    uri = page.file.src_uri
    source = next((path for path, one in PAGES.items() if one == uri and path != "README.md" and path.endswith(".md")), f"docs/{uri}")
    return SESSION.sub("```pycon\n", LINK.sub(lambda found: _link(found, source, uri), markdown))


def _link(found: re.Match[str], source: str, uri: str) -> str:
    """A link of a file of the repository, as one of its page."""
    if not found[1]:
        return found[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
    pages = {**PAGES, **{f"examples/{Path(page).stem}.py": page for page in examples()}}
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif target in pages:
        target = pages[target]
    else:
        return found[0]  # MkDocs warns of it
    return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (found[2] or "")


def example_page(path: Path) -> str:
    """The docstring of a program, its picture, and its source."""
    source = path.read_text("utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    picture = f"images/examples/{path.stem}.png"
    shown = f"![The picture that the program draws](../{picture})\n" if (ROOT / "docs" / picture).is_file() else ""
    return f"# {title.rstrip('.')}\n\n{text}\n\n{shown}\n```sh\npython examples/{path.name}\n```\n\n```python\n{source}```\n"
