"""Scaffold: a distribution around one plugin file, with a test that runs the contract kit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from slime_core import __version__, groups
from slime_core.errors import ConfigError, PluginError, unknown_name
from slime_core.registry.mark import NAME_PATTERN
from slime_core.registry.plugin_file import PluginFile

TEMPLATES: Final = files("slime_plugin_kit") / "templates"
ALGORITHM: Final = "algorithm"
PROJECT: Final = Template(
    """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "$dist"
version = "0.1.0"
description = "$description"
readme = "README.md"
requires-python = ">=3.11,<3.14"
dependencies = ["slime-rl>=$version,<$next"]

[project.optional-dependencies]
testing = ["slime-rl[testing]"]

$entries
[tool.hatch.build.targets.wheel]
packages = ["src/$package"]
"""
)
README: Final = Template(
    """\
# $dist

$description

    pip install .
    slime plugins --check
    pytest --slime-plugin $dist

$table
"""
)
TEST: Final = Template(
    '''\
"""The contract kit proves the rest: pytest --slime-plugin $dist"""

from importlib.metadata import distribution


def test_every_entry_point_is_there():
    for entry in distribution("$dist").entry_points:
        assert entry.load() is not None
'''
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written."""

    dist: str
    text: str
    entries: Mapping[str, Mapping[str, str]]
    """Group to name to what is behind it in the package's plugin module; empty: the module itself."""
    description: str

    @property
    def package(self) -> str:
        return re.sub(r"[-.]+", "_", self.dist)


def kinds() -> list[str]:
    """What there are templates for."""
    return sorted(file.name.removesuffix(".txt") for file in TEMPLATES.iterdir() if file.name.endswith(".txt"))


def plan_new(kind: str, name: str, dist: str | None) -> Plan:
    """From the template of a kind."""
    if kind not in kinds():
        raise ConfigError(unknown_name("slime new", kind, "kind", kinds()))
    check_name(name)
    identifier = name.replace("-", "_")
    if not identifier.isidentifier():
        raise ConfigError(f"{name}: not the name of a function. Pass one that begins with a letter.")
    words = re.split(r"[-_]", name)
    values = {
        "name": name,
        "identifier": identifier,
        "constant": identifier.upper(),
        "class_name": "".join(word.capitalize() for word in words),
    }
    text = Template((TEMPLATES / f"{kind}.txt").read_text(encoding="utf-8")).substitute(values)
    entries = entries_of(PluginFile(path=Path(f"{identifier}.py"), text=text, sha256=""))
    if kind == ALGORITHM:
        # A recipe is data: nothing marks it.
        entries[groups.ALGORITHMS] = {name: values["constant"]}
    return Plan(
        dist=dist or f"slime-{name.replace('_', '-')}",
        text=text,
        entries=entries,
        description=f"The {kind} {name} for slime.",
    )


def plan_from(path: Path, dist: str | None) -> Plan:
    """From a plugin file, which is taken as it is."""
    file = PluginFile.read(path)
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
    return Plan(
        dist=dist or f"slime-{name}",
        text=file.text,
        entries=entries_of(file),
        description=f"What was {path.name}, for slime.",
    )


def entries_of(file: PluginFile) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in file.load():
        found[entry.group][entry.name] = entry.target.partition(":")[2]
    return dict(found)


def check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f'"{name}" cannot be a name: use letters, digits, - and _.')


def write(plan: Plan, folder: Path) -> list[Path]:
    """The files; PluginError if the folder is there already."""
    if folder.exists():
        raise PluginError(f"{folder} is there already. Pass --into with another folder, or remove it.")
    rows = [(group, name) for group, named in sorted(plan.entries.items()) for name in sorted(named)]
    table = "\n".join(["| group | name |", "|---|---|", *(f"| `{group}` | `{name}` |" for group, name in rows)])
    major, minor = map(int, __version__.split(".")[:2])
    values = {
        "dist": plan.dist,
        "package": plan.package,
        "description": plan.description,
        "version": f"{major}.{minor}",
        # Contracts may change with the next minor release.
        "next": f"{major}.{minor + 1}",
        "entries": entry_tables(plan),
        "table": table,
    }
    source = Path("src") / plan.package
    texts = {
        Path("pyproject.toml"): PROJECT.substitute(values),
        Path("README.md"): README.substitute(values),
        source / "__init__.py": f'"""{plan.description}"""\n',
        source / "py.typed": "",
        source / "plugin.py": plan.text,
        Path("tests/test_entries.py"): TEST.substitute(values),
    }
    for relative, text in texts.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / relative for relative in texts]


def entry_tables(plan: Plan) -> str:
    lines = []
    for group, named in sorted(plan.entries.items()):
        key = f'"{group}"' if "." in group else group
        lines.append(f"[project.entry-points.{key}]")
        for name, target in sorted(named.items()):
            module = f"{plan.package}.plugin"
            lines.append(f'{name} = "{module}:{target}"' if target else f'{name} = "{module}"')
        lines.append("")
    return "\n".join(lines)
