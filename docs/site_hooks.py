"""Hooks of the documentation's site (mkdocs.yml).

The pages are written for a reader of the repository too, so two things are made here: the site's
navigation follows from `docs/index.md`, where every page is listed once, and a link to a file that
is not part of the site becomes that file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SECTION = re.compile(r"^\*\*(?P<title>[^*.]+)\.?\*\*", re.M)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Set the navigation: a tab for each section of the index."""
    index = (DOCS / "index.md").read_text()
    heads = list(SECTION.finditer(index))
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        text = index[head.end() : following.start() if following else len(index)]
        pages = [
            {link["text"]: link["path"]}
            for link in LINK.finditer(text)
            if not link["path"].startswith("..")
        ]
        nav.append({head["title"]: pages})
    config.nav = nav
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write links that lead out of the documentation as paths in the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def written(link: re.Match[str]) -> str:
        path = link["path"].partition("#")[0]
        if "://" in path or not path:
            return link[0]
        target = posixpath.normpath(posixpath.join("docs", folder, path))
        if target.startswith("docs/") and not target.endswith(".py"):
            return link[0]
        return f"{link['text']} (`{target}`)"

    return LINK.sub(written, markdown)
