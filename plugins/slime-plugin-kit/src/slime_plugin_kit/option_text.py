"""The options of a plugin as text for people."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from slime_core.registry.options import default_text, one_line, type_text


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a Config, as text for people."""

    name: str
    type: str
    default: str
    """`required` if there is none."""
    doc: str


def describe(config: type[BaseModel]) -> list[Option]:
    """The options in the order in which the Config defines them."""
    return [
        Option(name, type_text(field), default_text(field), one_line(field.description or ""))
        for name, field in config.model_fields.items()
    ]
