"""Document: a result of a search."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, model_validator


class Document(BaseModel):
    """A title and a text, or both in `contents`, whose first line is the title, as Search-R1's corpora have it."""

    id: str | int | None = None
    title: str = ""
    text: str = ""
    contents: str = ""

    @model_validator(mode="after")
    def has_words(self) -> Document:
        if not (self.title or self.text or self.contents):
            raise ValueError("a document has title and text, or contents")
        if not (self.title or self.text):
            title, _, text = self.contents.partition("\n")
            self.title, self.text = title.strip('"'), text
        return self


def listing(documents: Sequence[Document]) -> str:
    """The documents as text for the model."""
    return "\n".join(
        f"Doc {number}(Title: {document.title}) {document.text}" for number, document in enumerate(documents, 1)
    )
