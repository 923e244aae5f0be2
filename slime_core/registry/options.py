"""Options of a plugin: binds the user's values to its Config, and describes an option in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from slime_core.errors import ConfigError, near_matches
from slime_core.registry.boundary import foreign
from slime_core.registry.resolved import Resolved

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from slime_core.contracts.driver import DriverConfig


def bind(resolved: Resolved, options: Mapping[str, Any], *, where: str, base: Path | None = None) -> DriverConfig:
    """The driver's Config, validated and frozen. Relative paths among the options are relative to `base`.

    `where` is the table that the user wrote the options in (`algo`): ConfigError has one line for every problem, each
    starting with the path that the user typed (`algo.eps_clip_hihg: unknown option; ...`).
    """
    # Here, so that listing plugins does not import pydantic.
    from pydantic import ValidationError

    config: type[DriverConfig] = resolved.driver.Config
    owner = resolved.entry.provenance
    with foreign(where, f"options of {owner}"):
        try:
            return config.model_validate(dict(options), context={"base": base})
        except ValidationError as error:
            raise ConfigError(
                [problem_line(detail, config, options, owner, where) for detail in error.errors()]
            ) from error


def problem_line(
    detail: ErrorDetails, model: type[BaseModel], options: Mapping[str, Any], owner: str, where: str
) -> str:
    """One pydantic error in the words of the run file. `owner`: the plugin that has these options."""
    typed = _typed_path(detail["loc"], options, keep_last=detail["type"] == "missing")
    path = ".".join([where, *typed]) if where else ".".join(typed)
    table = _model_at(model, typed[:-1]) if typed else model
    if detail["type"] == "extra_forbidden":
        known = list(table.model_fields) if table is not None else []
        close = near_matches(typed[-1], known)
        matched = f"; close match: {', '.join(close)}" if close else ""
        return f"{path}: unknown option{matched}. Options of {owner}: {', '.join(known) or 'none'}."
    if detail["type"] == "missing":
        field = table.model_fields.get(typed[-1]) if table is not None else None
        doc = f" ({one_line(field.description)})" if field is not None and field.description else ""
        return f"{path}: is missing; {owner} needs it{doc}."
    message = detail["msg"].removeprefix("Value error, ").removesuffix(".")
    if not typed:
        return f"{path}: {message}."
    return f"{path} = {_shown(detail['input'])}: {message[:1].lower()}{message[1:]}."


def type_text(field: FieldInfo) -> str:
    """`float, gt=0`: the annotation, and the bounds that pydantic checks."""
    text = re.sub(r"Annotated\[str, BeforeValidator\(.*?\)\]", "path", inspect.formatannotation(field.annotation))
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace("PluginTable", "plugin")
    bounds = [bound for item in field.metadata if (bound := _bound_text(item))]
    if text == "str" and any("BeforeValidator" in repr(item) for item in field.metadata):
        text = "path"
    return ", ".join([text, *bounds])


def _bound_text(bound: Any) -> str:
    # annotated-types' bounds are dataclasses with one field: Gt(gt=0). Validators are no bounds.
    text = repr(bound)
    return text[text.index("(") + 1 : -1] if text.endswith(")") and "Validator" not in text else ""


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _shown(field.get_default(call_default_factory=True, validated_data={}))


def _typed_path(loc: Sequence[int | str], options: Mapping[str, Any], *, keep_last: bool) -> list[str]:
    """The parts of pydantic's location that the user wrote, without the names of union members that pydantic adds."""
    path: list[str] = []
    here: Any = options
    for position, part in enumerate(loc):
        if _holds(here, part):
            here = here[part]
        elif not (keep_last and position == len(loc) - 1):
            continue
        path.append(str(part))
    return path


def _holds(value: Any, part: int | str) -> bool:
    if isinstance(part, int):
        return isinstance(value, Sequence) and not isinstance(value, str) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The nested model that the options under `path` belong to; None where that is not known."""
    from pydantic import BaseModel

    here: Any = model
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(part)
            here = None if field is None else _without_none(field.annotation)
        else:
            # A list's or a mapping's values; the path has their number or key.
            here = _without_none(next((arg for arg in reversed(get_args(here)) if arg is not ...), None))
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _without_none(annotation: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not NoneType]
        return rest[0] if len(rest) == 1 else None
    return annotation


def _shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(text: str) -> str:
    """A docstring as a phrase, without its full stop."""
    return " ".join(text.split()).removesuffix(".")
