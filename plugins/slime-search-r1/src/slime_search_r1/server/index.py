"""Index: BM25 (Robertson and Zaragoza, 2009) over titles and texts, by bm25s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import bm25s

from slime_search_r1.document import Document

WORD: Final = r"(?u)\b\w+\b"
"""Words of any length, without stop words: names in a corpus may be `re` or `with`."""


class Hit(NamedTuple):
    document: Document
    score: float


class Index:
    """An index in memory. Several threads may search it at the same time."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = list(documents)
        self._bm25 = bm25s.BM25()
        self._bm25.index(words([f"{d.title}\n{d.text}" for d in self._documents]), show_progress=False)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Returns for each query at most `topk` documents that share a word with it, best first."""
        if not queries:
            return []
        numbers, scores = self._bm25.retrieve(
            words(queries), k=min(topk, len(self)), show_progress=False, backend_selection="numpy"
        )
        return [
            [Hit(self._documents[n], score) for n, score in zip(row, of_row, strict=True) if score > 0]
            for row, of_row in zip(numbers.tolist(), scores.tolist(), strict=True)
        ]


def words(texts: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = bm25s.tokenize(
        list(texts), token_pattern=WORD, stopwords=None, show_progress=False, return_ids=False
    )
    return found
