"""PluginTable: a name and, beside it, the options of the plugin of that name, still unbound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class PluginTable(BaseModel):
    """A string is short for a table with only a name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}
