"""Links between documents lead to files and headings that exist, also where they are read without the site."""

import pytest
from documents import PAGES, ROOT, anchors, links

GENERATED = {ROOT / "docs/reference/fla.md", ROOT / "docs/reference/cli.md"}
"""Pages that only the site has."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in GENERATED, path
        assert anchor is None or anchor in anchors(target), f"{path}#{anchor}"


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
