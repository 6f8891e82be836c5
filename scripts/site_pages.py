"""Hooks of mkdocs: pages that live beside the code they are about are part of the site, and links to them work."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

PAGES = {
    "reference/protocol.md": "src/headrace/wire/PROTOCOL.md",
    "reference/files.md": "src/headrace/storage/FORMAT.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Pages of the site to the files, elsewhere in this checkout, that they are made from."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Put all pages of a folder where the navigation names the folder."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between files of the checkout into links between pages of the site."""
    place = page.file.src_uri
    return _LINK.sub(lambda link: f"{link[1]}{_target(link[2], place)}{link[3] or ''}{link[4]}", markdown)


def source_of(page: str) -> str:
    """The file, counted from the root of the checkout, that a page of the site is made from."""
    return PAGES.get(page, f"docs/{page}")


def _target(link: str, page: str) -> str:
    """Where a link that counts from the page's source leads on the site, counted from the page."""
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))
    pages = {source: made for made, source in PAGES.items()}
    there = pages.get(meant, meant.removeprefix("docs/"))
    return posixpath.relpath(there, posixpath.dirname(page) or ".")


def _expanded(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_expanded(each) for each in nav]
    if isinstance(nav, dict):
        return {title: _expanded(below) for title, below in nav.items()}
    if nav.endswith("/"):
        return sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / nav).glob("*.md"))
    return nav
