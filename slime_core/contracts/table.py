"""Table: base of every table of options, the kernel's own and those of plugins."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Frozen, strict about names; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
