"""PluginTable: a name and, beside it, the options of the plugin of that name, still unbound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class PluginTable(BaseModel, extra="allow", frozen=True):
    """A string is short for a table with only a name."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler.resolve_ref_schema(handler(core_schema))]}

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}
