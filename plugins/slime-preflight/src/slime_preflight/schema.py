"""The JSON schema of a run file, with the options of the chosen plugins in their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, kernel_flags
from slime_core.config.run import RunConfig
from slime_core.registry import Registry


def run_schema(chosen: Mapping[str, str], plugin_files: Sequence[Path] = ()) -> dict[str, Any]:
    """`chosen` maps tables (backend, engine, algo, reward, generate) to plugin names. PluginError for an unknown one."""
    schema = RunConfig.model_json_schema(mode="validation")
    flags = [*kernel_flags(), *chosen_flags(chosen, Registry.from_environment(plugin_files), strict=True)]
    definitions = schema.setdefault("$defs", {})
    for table, name in chosen.items():
        owned = [flag for flag in flags if flag.path[:-1] == (table,) and flag.path[-1] != "name"]
        title = f"{table}_{name}".replace("/", "_").replace("-", "_")
        definitions[title] = {
            "type": "object",
            "properties": {
                "name": {"const": name},
                **{flag.path[-1]: option_schema(flag, definitions) for flag in owned},
            },
            "required": ["name", *(flag.path[-1] for flag in owned if flag.field.is_required() and table != "algo")],
            "additionalProperties": False,
        }
        schema["properties"][table] = {"anyOf": [{"const": name}, {"$ref": f"#/$defs/{title}"}]}
    return schema


def option_schema(flag: Flag, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one option, with its text and its default."""
    schema = TypeAdapter(flag.field.rebuild_annotation()).json_schema(ref_template="#/$defs/{model}")
    definitions |= schema.pop("$defs", {})
    if flag.field.description:
        schema["description"] = " ".join(flag.field.description.split())
    if not flag.field.is_required():
        default = flag.field.get_default(call_default_factory=True, validated_data={})
        schema["default"] = TypeAdapter(flag.field.rebuild_annotation()).dump_python(default, mode="json")
    return schema
