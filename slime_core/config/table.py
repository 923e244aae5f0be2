"""Table: base of the kernel's own config tables."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Frozen, strict about names; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
