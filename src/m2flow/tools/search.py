"""Retrieval over a corpus: the best passages for a query, by BM25.

A corpus is a file of JSON lines, each with `text`, or `contents` as in the corpora of Search-R1 and
FlashRAG, and with `title` if it has one; or a function `module:function` that gives the passages.
It is indexed once in a process, and not before somebody is to search it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from m2flow.errors import UserError, nearest
from m2flow.tools.bm25 import BM25
from m2flow.tools.tool import ToolError, schema, text_argument
from m2flow.user_code import user_function, what_raised

NOTHING = "nothing found"

_indexing = threading.Lock()

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Search:
    """Finds passages.

    Args:
        corpus: the file, or the path of a function.
        top: passages of an answer at most.
        numbered: whether each passage stands behind its rank, as `Doc 1: ...`.

    Raises:
        UserError: the corpus cannot be read.
    """

    name = "search"
    description = "Search a collection of texts. The best passages for the query come back."
    parameters = schema(query="what to look for")

    def __init__(self, corpus: str, top: int = 3, numbered: bool = True) -> None:
        if not isinstance(top, int) or isinstance(top, bool) or top < 1:
            raise UserError(
                "is no number of passages", key="tools.search.top", value=top, expected="1 or more"
            )
        check_corpus(corpus)
        self._corpus, self._top, self._numbered = corpus, top, numbered

    def prepare(self) -> None:
        """Read and index the corpus, which may take longer than a call."""
        with _indexing:
            indexed(self._corpus)

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """The passages, one a line."""
        query = text_argument(arguments, "query")
        if not query.strip():
            raise ToolError("the query is empty")
        passages, index = indexed(self._corpus)
        found = [passages[number] for number, _ in index.search(query, self._top)]
        if not self._numbered:
            return "\n".join(found) or NOTHING
        lines = [f"Doc {rank}: {passage}" for rank, passage in enumerate(found, start=1)]
        return "\n".join(lines) or NOTHING

    def close(self) -> None:
        """The index stays for whoever searches the same corpus."""


@lru_cache(maxsize=4)
def indexed(path: str) -> tuple[tuple[str, ...], BM25]:
    """The passages of a corpus, and their index.

    Raises:
        UserError: as for `check_corpus`.
    """
    passages = tuple(_read(path))
    return passages, BM25(passages)


def check_corpus(path: str) -> None:
    """Read a corpus to its end, and keep nothing of it.

    Raises:
        UserError: there is no such file or function, or a line of the file is no passage.
    """
    if not sum(1 for _ in _read(path)):
        raise UserError("holds no passage", key=path, expected='lines such as {"text": "..."}')


def corpus_file(path: str) -> Path | None:
    """The file of a corpus; None where it is what a function gives."""
    file = Path(path).expanduser()
    return None if _FUNCTION.fullmatch(path) and not file.exists() else file


def _read(path: str) -> Iterable[str]:
    file = corpus_file(path)
    return _given(path) if file is None else _passages(file)


def _given(path: str) -> list[str]:
    key = "tools.search.corpus"
    function = user_function(path, key)
    try:
        found = list(function())
    except Exception as error:
        raise UserError(f"raised {what_raised(error)}", key=key, value=path) from error
    wrong = next((one for one in found if not isinstance(one, str)), None)
    if wrong is not None:
        raise UserError("gives what is no text", key=key, value=wrong, expected="a text a passage")
    return found


def _passages(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _passage(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the corpus cannot be read: {getattr(error, 'strerror', None) or error}",
            key="tools.search.corpus",
            value=str(path),
            hint=_near(path),
        ) from None


def _passage(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    text = row.get("text", row.get("contents")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError("is no passage", key=where, expected='a line such as {"text": "..."}')
    assert isinstance(row, dict)
    title = row.get("title")
    return " ".join(f"{title}: {text}".split() if isinstance(title, str) else text.split())


def _near(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}"
    close = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"did you mean {str(path.parent / close)!r}?" if close else "write one passage a line"
