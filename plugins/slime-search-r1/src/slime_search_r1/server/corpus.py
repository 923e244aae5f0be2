"""Reads documents from JSON lines."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from slime_core.errors import DataError
from slime_search_r1.document import Document


def read_corpus(path: Path) -> list[Document]:
    """DataError names a line that is no document. It is also raised for a corpus without documents."""
    documents = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    documents.append(read_document(line, f"{path}, line {number}"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None
    if not documents:
        raise DataError(f"{path}: there is no document in it.")
    return documents


def read_document(line: bytes, where: str) -> Document:
    try:
        return Document.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise DataError(f'{where}: {problem}. A line is {{"title": "...", "text": "..."}}.') from None
