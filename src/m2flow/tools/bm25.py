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

import numpy as np

_TERM = re.compile(r"\w+")


def terms_of(text: str) -> list[str]:
    """Words in lower case; no stemming, no stop words."""
    return _TERM.findall(text.lower())


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
        best = np.argsort(-scores, kind="stable")[:count]
        return [(int(number), float(scores[number])) for number in best if scores[number] > 0]
