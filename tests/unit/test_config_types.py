"""A value of any type at any key of the run file is accepted, or is an error for the user: never a traceback."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
from pydantic import BaseModel

from slime_core.cli import invocation
from slime_core.config.algo import AlgoConfig
from slime_core.config.evaluation import EvalSet
from slime_core.config.flags import bare_type
from slime_core.config.plugin_table import PluginTable
from slime_core.config.run import RunConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.registry import Registry

VALUES: Final = (3, "x", True, [], {})


def keys_of(table: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys, tables included."""
    for key, info in table.model_fields.items():
        yield (*path, key)
        inner = bare_type(info.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not PluginTable:
            yield from keys_of(inner, (*path, key))


OTHERS: Final = [
    *keys_of(AlgoConfig, ("algo",)), *keys_of(EvalSet, ("eval", "datasets", "held_out")),
    ("data", "name"), ("data", "prompt_data"), ("data", "on_bad_row"), ("sync", "name"), ("engines", "teacher"),
    ("engines", "teacher", "engine"), ("roles", "x"),
    ("reward", "name"), ("reward", "x"), ("train", "optimizer", "name"), ("rollout", "collector", "name"), ("x",),
]  # fmt: skip
"""Keys of tables whose names the user chooses, and of plugins."""


Bind: TypeAlias = Callable[..., object]


@pytest.fixture
def bind(bound: Bind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Binds a run file in which the key at `path` has this value. One registry: reading what is installed takes longest."""
    bound()
    tables = tomllib.loads((tmp_path / "run.toml").read_text())
    registries: dict[tuple[Path, ...], Registry] = {}

    def once(files: Sequence[Path], **options: Any) -> Registry:
        if tuple(files) not in registries:
            registries[tuple(files)] = Registry(files)
        return registries[tuple(files)]

    monkeypatch.setattr(Registry, "from_environment", once)

    def bind(path: tuple[str, ...] = (), value: object = None, *, flags: Sequence[str] = ()) -> object:
        changed = with_value(tables, path, value) if path else tables
        monkeypatch.setattr(invocation, "read_run_file", lambda file: changed)
        return invocation.bind_invocation(invocation.Words(tmp_path / "run.toml", {}, tuple(flags)))

    return bind


def with_value(tables: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(tables)
    table = changed
    for key in path[:-1]:
        if isinstance(table.get(key), str):
            table[key] = {"name": table[key]}
        table = table.setdefault(key, {})
    table[path[-1]] = value
    return changed


def test_a_value_of_any_type_is_no_traceback(bind: Bind) -> None:
    accepted = refused = 0
    for path in [*keys_of(RunConfig), *OTHERS]:
        for value in VALUES:
            try:
                bind(path, value)
                accepted += 1
            except SlimeError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{'.'.join(path)} = {value!r}") from error
    assert accepted > 100
    assert refused > 800


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "data.source=3"], "data.source = 3: input should be a valid string"),
        (["--set", "eval.datasets=3"], "datasets must be a table of sets: [eval.datasets.NAME] with path = FILE"),
        (["--set", "eval.datasets=[3]"], "datasets[0] must be a table with a name"),
        (["--set", "eval.eval_prompt_data=3"], "eval_prompt_data requires a list of NAME PATH pairs"),
        (["--set", "algo.shaping=3"], "algo.shaping = 3: input should be a valid tuple"),
        (["--set", "sync.transport=3"], "sync.transport = 3: input should be a valid string"),
        (["--set", "data.name='stream'"], "data.name: unknown option; data.source chooses the plugin"),
        (["--set", "sync.name=3"], "sync.name: unknown option; sync.transport chooses the plugin"),
        (["--set", "algo.corrections=[3]"], "algo.corrections"),
        (["--set", "launcher.name=[]"], "launcher.name = []: input should be a valid string"),
    ],
)
def test_the_message_names_the_key(bind: Bind, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(flags=flags)
    assert message in str(caught.value)
