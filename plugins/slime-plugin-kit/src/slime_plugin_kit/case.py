"""Subject: one entry point under test. Case: it with one set of options, which is what a test gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from slime_core import groups
from slime_core.config.bind_algo import bind_algo
from slime_core.config.binder import Binder
from slime_core.config.bound import BoundAlgo
from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example
from slime_core.contracts.reward import RewardDriver
from slime_core.errors import ConfigError, PluginError
from slime_core.registry import Registry, Resolved, bind
from slime_core.registry.boundary import error_text, held
from slime_core.registry.entry import Entry

E = TypeVar("E", bound=Example)


class Subject:
    """One entry point. Its errors are kept in `problems`, which a test reports."""

    def __init__(self, entry: Entry, registry: Registry, folder: Path, asked: tuple[Entry, ...]) -> None:
        self.entry = entry
        self.asked = asked
        """Everything that is under test, this one included."""
        self.registry = registry
        self.folder = folder
        """For the files of its examples."""
        self.problems: list[str] = []
        self.resolved: Resolved | None = None
        self.examples: tuple[Example, ...] = ()
        if entry.group in groups.DRIVER_GROUPS:
            try:
                self.resolved = registry.resolve(entry.group, entry.qualified, where="--slime-plugin")
            except PluginError as error:
                self.problems.append(str(error))
        self.itself = Case(self, {}, "")
        """For what concerns the entry point, whatever its options."""
        self.cases: tuple[Case, ...] = tuple(self._cases())

    @property
    def is_recipe(self) -> bool:
        return self.resolved is not None and isinstance(self.resolved.loaded, Recipe)

    def _cases(self) -> Sequence[Case]:
        if self.resolved is None:
            return []
        if not self.is_recipe:
            self.folder.mkdir(parents=True)
            self.examples = self._examples(self.resolved.driver)
        known: list[Mapping[str, Any]] = []
        for options in ({}, *(example.options for example in self.examples)):
            if options not in known:
                known.append(options)
        cases: list[Case] = []
        for options in known:
            case = Case(self, options, label_of(options, len(cases)))
            found = case.problems()
            if not found:
                cases.append(case)
            # Options that are required have no default: then examples have to give them.
            elif options or len(known) == 1:
                self.problems += found
        # Here are no engines of a run.
        return [case for case in cases if not case.needs_reward_model] or cases

    def _examples(self, driver: Any) -> tuple[Example, ...]:
        with held() as failed:
            examples = tuple(driver.examples(self.folder))
        if failed.raised is not None:
            # A test reports it, the others continue.
            self.problems.append(f"its `examples` raise {error_text(failed.raised)}")
            return ()
        wrong = [type(example).__name__ for example in examples if not isinstance(example, Example)]
        if wrong:
            self.problems.append(f"its `examples` give {', '.join(wrong)}, which are no Example")
        return tuple(example for example in examples if isinstance(example, Example))


@dataclass(frozen=True, eq=False)
class Case:
    """A subject with the options of one or more of its examples, or with its defaults."""

    subject: Subject
    options: Mapping[str, Any]
    label: str

    @property
    def entry(self) -> Entry:
        return self.subject.entry

    @property
    def id(self) -> str:
        return f"{self.entry.qualified}{self.label and '-' + self.label}"

    @property
    def driver(self) -> Any:
        assert self.subject.resolved is not None
        return self.subject.resolved.driver

    @cached_property
    def config(self) -> DriverConfig:
        assert self.subject.resolved is not None
        return bind(self.subject.resolved, self.options, where=self.entry.name)

    @cached_property
    def algo(self) -> BoundAlgo:
        """The recipe and its parts, bound. Only for recipes."""
        return self.bind_algo({})

    def bind_algo(self, overrides: Mapping[str, Any]) -> BoundAlgo:
        """The recipe, bound with keys that a run file might set."""
        table = PluginTable.model_validate({"name": self.entry.qualified, **self.options, **overrides})
        binder = Binder(self.subject.registry, self.subject.folder, [])
        algo = bind_algo(table, binder)
        if algo is None or binder.problems:
            raise ConfigError(binder.problems)
        return algo

    @property
    def needs_reward_model(self) -> bool:
        """A reward that is built with the servers of a run's model."""
        driver = self.driver
        return isinstance(driver, type) and issubclass(driver, RewardDriver) and driver.needs_reward_model(self.config)

    def problems(self) -> list[str]:
        """Why the options cannot be bound; empty if they can."""
        try:
            _ = self.algo if self.subject.is_recipe else self.config
        except ConfigError as error:
            return error.problems
        return []

    @property
    def part(self) -> BoundPlugin:
        """The plugin with its config, as a run binds it."""
        entry = self.entry
        return BoundPlugin(
            group=entry.group,
            name=entry.qualified,
            where=entry.name,
            entry=entry,
            driver=self.driver,
            config=self.config,
        )

    def build(self) -> Any:
        """A new object of the contract."""
        return self.driver.build(self.config)

    def examples(self, kind: type[E]) -> list[E]:
        """Those of this kind that have this case's options."""
        return [e for e in self.subject.examples if isinstance(e, kind) and dict(e.options) == dict(self.options)]


def label_of(options: Mapping[str, Any], number: int) -> str:
    """Readable and the same in every process: paths are left out."""
    plain = {k: v for k, v in options.items() if isinstance(v, bool | int | float | str) and os.sep not in str(v)}
    if len(plain) == len(options):
        return ",".join(f"{key}={value}" for key, value in plain.items())
    return f"options{number + 1}"
