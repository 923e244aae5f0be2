"""Table: base of every table of options, the kernel's own and those of plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

INT64: Final = 2**63


class Table(BaseModel):
    """Frozen; unknown keys are errors, and so are numbers that are not finite; the docstring below a field is its help text. A
    field that may be infinite is annotated with `pydantic.AllowInfNan`. true and false are no numbers, and integers have 64
    bits, as in TOML."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1.
        annotation = cls.model_fields[info.field_name or ""].annotation
        if any(isinstance(leaf, bool) for leaf in leaves(value)) and not takes_bool(annotation):
            raise ValueError("requires a number or text, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def integers_have_64_bits(cls, value: Any) -> Any:
        if any(isinstance(leaf, int) and not -INT64 <= leaf < INT64 for leaf in leaves(value)):
            raise ValueError("is beyond the integers of 64 bits")
        return value


def leaves(value: Any) -> Iterator[Any]:
    """The values in lists and tables of any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def takes_bool(annotation: Any) -> bool:
    """True if a truth value, or a table with checks of its own, may be somewhere in a value of this type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return annotation in (bool, Any, object, True, False) or any(map(takes_bool, get_args(annotation)))
