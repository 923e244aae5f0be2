"""A run file as TOML, from the tables of a translation."""

from __future__ import annotations

from typing import Any

import tomlkit

from slime_core.config.run import RunConfig


def run_file(tables: dict[str, Any], source: str) -> str:
    """The run file, its tables in the order of RunConfig. `source`: what was translated."""
    order = list(RunConfig.model_fields)
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From {source}, by slime-compat."))
    # Plain keys come before tables: after a table they would belong to it.
    keys = sorted(tables, key=lambda key: (isinstance(tables[key], dict), order.index(key)))
    for key in keys:
        value = tables[key]
        if isinstance(value, dict) and set(value) == {"name"}:
            value = value["name"]
        document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document).rstrip() + "\n"
