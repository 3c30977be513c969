"""`BM25`: an inverted index over texts, held in memory, with the ranking function Okapi BM25.

The score of a document is a sum over the query's terms t of
idf(t) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length)), with
idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5)) (Robertson and Zaragoza 2009, section 3.4.3, in the form
of Lucene, whose idf is never negative). Of equal scores the document that comes first wins, so that
a search gives the same on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_CJK = (
    r"\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    r"\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Han, kana and Hangul: what is written without spaces, or with particles joined to words."""

_RUN = re.compile(rf"([{_CJK}]+)|[^\W{_CJK}]+")


def terms_of(text: str) -> list[str]:
    """Words in lower case, no stemming, no stop words; of Chinese, Japanese and Korean each
    character and each pair of neighbours.
    """
    terms: list[str] = []
    for run in _RUN.finditer(text.lower()):
        terms += [*run[1], *map("".join, pairwise(run[1]))] if run[1] else [run[0]]
    return terms


class BM25:
    """An index.

    Args:
        texts: the documents.
        k1, b: how term frequency saturates, and how much length counts.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        postings: dict[str, list[tuple[int, int]]] = {}
        lengths = np.zeros(len(texts))
        for number, text in enumerate(texts):
            terms = terms_of(text)
            lengths[number] = len(terms)
            for term, count in Counter(terms).items():
                postings.setdefault(term, []).append((number, count))
        mean = float(lengths.mean()) if len(texts) else 1.0
        slowed = k1 * (1 - b + b * lengths / max(mean, 1e-9))
        self._size = len(texts)
        self._weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for term, found in postings.items():
            numbers, counts = np.array(found).T
            idf = np.log1p((len(texts) - len(found) + 0.5) / (len(found) + 0.5))
            weight = idf * counts * (k1 + 1) / (counts + slowed[numbers])
            self._weights[term] = numbers, weight

    def search(self, query: str, count: int) -> list[tuple[int, float]]:
        """At most `count` documents that have a term of the query, best first, with their score."""
        scores = np.zeros(self._size)
        for term in terms_of(query):
            if term in self._weights:
                numbers, weights = self._weights[term]
                scores[numbers] += weights
        (found,) = np.nonzero(scores)
        if len(found) > count:
            least = np.partition(scores[found], -count)[-count]
            found = found[scores[found] >= least]
        best = found[np.argsort(-scores[found], kind="stable")][:count]
        return [(int(number), float(scores[number])) for number in best]
