"""Flags: which key a `--flag` sets.

A kernel key's flag is its name with dashes. A plugin table's own name sets its `name` (`--algo`). Options of the chosen
backend, algorithm parts, source and transport go unprefixed, an engine's with its name as prefix; those inside a table
of a plugin's have the prefix that it gives them (`--router-`). Any key can be given by its dotted path
(`--algo.advantage`) or by `--set algo.advantage=x`.

The last of several values wins. A list takes several words, and its flag may be repeated: the words are joined. It
replaces the run file's list; `--plugin` adds to it, for what the file names may need its own plugins.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.algo import AlgoConfig
from slime_core.config.earlier_keys import FLAGS
from slime_core.config.plugin_table import PluginTable
from slime_core.config.run import RunConfig
from slime_core.contracts.driver import TableOptions
from slime_core.contracts.paths import FlagText
from slime_core.errors import ConfigError, near_matches

ALIASES: Final = {"async-buffer-size": "max-async-level", **FLAGS}
"""Names that others have for a flag, and those that it had in an earlier release."""

ADDING: Final = frozenset({("plugin",)})
"""Keys whose flags add to the run file's list."""


class AddedList(list[Any]):
    """What comes after the run file's list."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option as the command line knows it."""

    name: str
    """Without the leading dashes."""
    path: tuple[str, ...]
    owner: str
    """Who documents it: `slime` or the distribution of a plugin."""
    field: FieldInfo
    aliases: tuple[str, ...] = ()
    """Other names for it, which no listing has."""

    @property
    def is_switch(self) -> bool:
        return bare_type(self.field.annotation) is bool


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of a run: the kernel's, and those of the plugins that it chose."""

    by_name: Mapping[str, Flag] = field(default_factory=dict)
    ambiguous: Mapping[str, Sequence[Flag]] = field(default_factory=dict)
    absent: Callable[[], Mapping[str, Sequence[str]]] = dict
    """Flags of plugins that are installed and not chosen, to what chooses them. Asked when a flag is unknown."""
    listed_by: str = "slime config explain"
    """The command that lists them."""

    @classmethod
    def of(
        cls,
        flags: Iterable[Flag],
        *,
        absent: Callable[[], Mapping[str, Sequence[str]]] = dict,
        listed_by: str = "slime config explain",
    ) -> FlagTable:
        """A dotted path always works; a short name only where one key has it. The kernel's win over plugins'."""
        short: dict[str, list[Flag]] = defaultdict(list)
        by_name: dict[str, Flag] = {}
        for flag in flags:
            by_name[".".join(flag.path)] = flag
            if flag.field is NAME_FIELD:
                # A table's name alone sets its `name`.
                by_name[".".join(flag.path[:-1])] = flag
            for name in (flag.name, *flag.aliases):
                short[name].append(flag)
        ambiguous = {}
        for name, owners in short.items():
            kernel = [flag for flag in owners if flag.owner == "slime"]
            distinct = {flag.path: flag for flag in kernel or owners}
            if len(distinct) == 1:
                by_name[name] = next(iter(distinct.values()))
            else:
                ambiguous[name] = list(distinct.values())
        return cls(by_name, ambiguous, absent, listed_by)

    def parse(self, words: Sequence[str], *, lenient: bool = False) -> list[tuple[tuple[str, ...], Any]]:
        """(path, value) of each flag. ConfigError lists every word that is not understood; `lenient` skips those."""
        overrides: list[tuple[tuple[str, ...], Any]] = []
        problems: list[str] = []
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if not word.startswith("--"):
                problems.append(f'"{word}": unexpected word; flags start with --.')
                continue
            name, has_value, value = word[2:].partition("=")
            values = [value] if has_value else []
            if name == "set":
                while not has_value and position < len(words) and not values:
                    values, position = [words[position]], position + 1
                path, has_path, text = (values[0] if values else "").partition("=")
                if not has_path:
                    problems.append("--set requires KEY=VALUE, for example --set train.lr=1e-4.")
                    continue
                overrides.append((tuple(path.split(".")), toml_value(text)))
                continue
            flag, negated = self.find(name)
            if flag is None:
                problems.append(self.unknown(name))
                while not has_value and position < len(words) and not words[position].startswith("--"):
                    position += 1
                continue
            while not has_value and position < len(words) and not words[position].startswith("--"):
                if values and not takes_many(flag.field.annotation):
                    break
                if flag.is_switch and words[position].lower() not in ("true", "false"):
                    break
                values.append(words[position])
                position += 1
            if negated and values:
                problems.append(f"--{name} takes no value; pass --{'.'.join(flag.path)} {values[0]}.")
            elif negated or (flag.is_switch and not values):
                overrides.append((flag.path, not negated))
            elif not values:
                problems.append(f"--{name} requires a value.")
            else:
                try:
                    set_value(overrides, flag.path, flag_value(values, flag.field.annotation))
                except ConfigError as error:
                    problems += [f"--{name} {problem}" for problem in error.problems]
        if problems and not lenient:
            raise ConfigError(problems)
        return overrides

    def find(self, name: str) -> tuple[Flag | None, bool]:
        """The flag, and whether it was negated (--no-NAME)."""
        dashed = name.replace("_", "-")
        negation = "no-" if dashed.startswith("no-") and dashed[3:] in ALIASES else ""
        dashed = negation + ALIASES.get(dashed.removeprefix(negation), dashed.removeprefix(negation))
        # A path has underscores, a plugin's option behind a prefix (`--collector.some-key`) has dashes.
        spelled = dashed if "." not in name or dashed in self.by_name else name.replace("-", "_")
        if spelled in self.by_name:
            return self.by_name[spelled], False
        positive = self.by_name.get(spelled[3:]) if spelled.startswith(("no-", "no_")) else None
        if positive is not None and positive.is_switch:
            return positive, True
        return None, False

    def unknown(self, name: str) -> str:
        if name in self.ambiguous:
            ways = " or ".join("--" + ".".join(flag.path) for flag in self.ambiguous[name])
            return f"--{name}: several keys have this name; pass {ways}."
        spelled = name.replace("_", "-")
        choices = self.absent()
        if owners := choices.get(spelled) or choices.get(spelled.removeprefix("no-")):
            return f"--{name}: unknown flag without the plugin that it belongs to: {' or '.join(owners)}."
        close = near_matches(name, self.by_name)
        matched = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
        return f"--{name}: unknown flag{matched}. `{self.listed_by}` lists every key."


def kernel_flags() -> list[Flag]:
    """The flags of the kernel's own tables, and one for each plugin table's name."""
    return [*walk(RunConfig, ()), *option_flags(AlgoConfig, ("algo",), "slime")]


def walk(model: type[BaseModel], path: tuple[str, ...]) -> Iterable[Flag]:
    for key, info in model.model_fields.items():
        inner = bare_type(info.annotation)
        if isinstance(inner, type) and issubclass(inner, PluginTable):
            yield Flag(name=short_name(path, key), path=(*path, key, "name"), owner="slime", field=NAME_FIELD)
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            if "name" in inner.model_fields:
                yield Flag(name=key, path=(*path, key, "name"), owner="slime", field=inner.model_fields["name"])
            yield from (flag for flag in walk(inner, (*path, key)) if flag.path != (*path, key, "name"))
        else:
            yield Flag(name=short_name(path, key), path=(*path, key), owner="slime", field=info)


def short_name(path: tuple[str, ...], key: str) -> str:
    """Tables inside tables repeat the names of what they override: their flags are dotted paths, but a role's
    keys by its name (`--critic-lr`)."""
    if len(path) == 2 and path[0] == "roles":
        return f"{path[1]}-{key}".replace("_", "-")
    return key.replace("_", "-") if len(path) < 2 else ".".join((*path, key))


NAME_FIELD = PluginTable.model_fields["name"]


def option_flags(
    config: type[BaseModel],
    path: tuple[str, ...],
    owner: str,
    *,
    prefix: str = "",
    aliases: Mapping[str, str] = MappingProxyType({}),
    tables: Sequence[TableOptions] = (),
) -> Iterable[Flag]:
    """The flags of a plugin's options. `aliases`: options by other names of their flags. `tables`: options in options."""
    for key, info in config.model_fields.items():
        others = tuple(alias for alias, option in aliases.items() if option == key)
        yield Flag(name=prefix + key.replace("_", "-"), path=(*path, key), owner=owner, field=info, aliases=others)
    for table in tables:
        for key, info in table.fields.items():
            name = table.prefix + key.replace("_", "-")
            yield Flag(name=name, path=(*path, table.option, key), owner=owner, field=info)


def bare_type(annotation: Any) -> Any:
    """Without `| None` and Annotated; a union of several stays as it is."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not NoneType]
        if len(rest) == 1:
            return bare_type(rest[0])
    return annotation


def takes_many(annotation: Any) -> bool:
    return get_origin(bare_type(annotation)) in (tuple, list)


def set_value(overrides: list[tuple[tuple[str, ...], Any]], path: tuple[str, ...], value: Any) -> None:
    """Adds an override; a list continues where an earlier one of the same key ended."""
    if not isinstance(value, list):
        overrides.append((path, value))
        return
    for earlier, given in reversed(overrides):
        if earlier == path and isinstance(given, list):
            given.extend(value)
            return
    overrides.append((path, AddedList(value) if path in ADDING else value))


def flag_value(words: Sequence[str], annotation: Any) -> Any:
    """Text for pydantic to convert; TOML for lists and tables that begin like one; `none` where None is allowed."""
    first = words[0]
    if takes_many(annotation):
        return [item for word in words for item in list_items(word, annotation)]
    if first[:1] in ("[", "{"):
        return toml_value(first)
    if first.lower() == "none" and NoneType in get_args(annotation):
        return None
    return FlagText(first)


def list_items(word: str, annotation: Any) -> list[Any]:
    """The items of one word of a list: a TOML table or list, or texts with commas between. ConfigError for what begins like
    one in a list of tables: cut at its commas it would be taken for names."""
    value = toml_value(word) if word[:1] in ("[", "{") else ""
    if isinstance(value, str):
        item = bare_type(get_args(bare_type(annotation))[0])
        if word[:1] not in ("[", "{") or not (isinstance(item, type) and issubclass(item, BaseModel)):
            return [FlagText(part) for part in word.split(",") if part]
        raise ConfigError(
            f"{word}: begins like a TOML table or list and is none. Put it into quotes, as one word: '{{ name = \"NAME\" }}'."
        )
    return value if isinstance(value, list) else [value]


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself if it is none."""
    try:
        return mark_text(tomllib.loads(f"value = {text}")["value"])
    except tomllib.TOMLDecodeError:
        return FlagText(text)


def mark_text(value: Any) -> Any:
    """Strings inside become FlagText, so that paths in them are relative to the working directory."""
    if isinstance(value, str):
        return FlagText(value)
    if isinstance(value, list):
        return [mark_text(inner) for inner in value]
    if isinstance(value, dict):
        return {key: mark_text(inner) for key, inner in value.items()}
    return value
