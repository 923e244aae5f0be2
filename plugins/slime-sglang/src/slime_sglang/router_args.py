"""The options of the installed sglang-router's RouterArgs, read from its source."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from slime_core.errors import near_matches
from slime_sglang.option_choices import NamedLists
from slime_sglang.server_args import ServerOption, options_in

OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "policy": "engine.router_policy",
        "pd_disaggregation": "engine.prefill_servers",
        "worker_urls": "the engine: its servers",
        "prefill_urls": "the engine: its servers",
        "decode_urls": "the engine: its servers",
        "host": "the engine: loopback",
        "port": "the engine: a free one",
        "prometheus_host": "the engine: loopback",
        "prometheus_port": "the engine: a free one",
        "api_key": "the engine: a new one for each start",
    }
)
"""Options that the run decides, and the key that sets each instead."""


@cache
def router_options() -> Mapping[str, ServerOption]:
    """Options by name; empty if sglang-router is not installed."""
    spec = importlib.util.find_spec("sglang_router")
    places = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(places))) / "router_args.py" if places else None
    if file is None or not file.is_file():
        return MappingProxyType({})
    # The choices of its command line are not used: it accepts more policies.
    found = options_in(ast.parse(file.read_bytes()), NamedLists({}), record="RouterArgs")
    return MappingProxyType({option.name: option for option in found})


def fields() -> dict[str, FieldInfo]:
    """Options that a run may set, by name."""
    return {
        name: FieldInfo(annotation=option.type | None, default=None, description=option.doc)
        for name, option in router_options().items()
        if name not in OWNED
    }


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with values of sglang-router's types. Raises one ValueError with all options that are unknown, are decided by
    the run, or have an invalid value."""
    known = router_options()
    problems: list[str] = []
    result: dict[str, Any] = {}
    for name, value in given.items():
        option = known.get(name)
        if name in OWNED:
            problems.append(f"{name}: not an option of a run: decided by {OWNED[name]}")
        elif option is None and known:
            close = near_matches(name, known)
            matched = f"; close match: {', '.join(close)}" if close else ""
            problems.append(f"{name}: the installed sglang-router has no such option{matched}")
        elif option is None:
            result[name] = value
        else:
            result[name] = converted(option, value, problems)
    if problems:
        raise ValueError("; ".join(problems))
    return result


def converted(option: ServerOption, value: Any, problems: list[str]) -> Any:
    try:
        return TypeAdapter[Any](option.type).validate_python(value)
    except ValidationError as error:
        stated = error.errors()[0]["msg"]
        problems.append(f"{option.name} = {value!r}: {stated[:1].lower()}{stated[1:]}")
        return value
