"""Table: base of every table of options, the kernel's own and those of plugins."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Frozen; unknown keys are errors, and so are numbers that are not finite; the docstring below a field is its help text. A
    field that may be infinite is annotated with `pydantic.AllowInfNan`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
