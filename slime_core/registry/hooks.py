"""Typed wrapper around pluggy; the only code that calls hooks."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core import groups
from slime_core.contracts.hookspecs import HOOK_NAMES, PROJECT, Event, HookSpecs, RunEnd
from slime_core.errors import PluginError, SlimeError, near_matches
from slime_core.registry.boundary import error_text, held, raise_as
from slime_core.registry.registry import DENY_VARIABLE

if TYPE_CHECKING:
    from slime_core.registry.registry import Registry

Trace = Callable[[str], None]


class Hooks:
    """An observer that raises stops the run with a PluginError that names it; at `run_end` all observers are called first,
    and their errors are raised together."""

    def __init__(self, plugins: Mapping[str, object] | None = None, *, trace: Trace | None = None) -> None:
        """`plugins`: `dist/name` to a module or an object (a class is made into an object) with marked functions.
        PluginError lists everything that is wrong with any of them."""
        self._trace = trace
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        problems = [problem for name, plugin in (plugins or {}).items() for problem in self._register(name, plugin)]
        if problems:
            raise PluginError("\n".join(problems))
        self._manager.check_pending()
        self._listeners = {hook: self._observers(hook) for hook in HOOK_NAMES}

    @classmethod
    def load(cls, registry: Registry, *, own: Mapping[str, object] | None = None) -> Hooks:
        """Imports and registers every entry of the group `slime`, each under `dist/name`, after the caller's `own`.
        Uses the registry's `trace` too."""
        plugins: dict[str, object] = dict(own or {})
        problems = []
        for entry in registry.entries(groups.HOOKS):
            if entry.qualified in plugins:
                problems.append(f"hooks: {entry.provenance} registers {entry.name} twice. Upgrade it, or uninstall it.")
                continue
            try:
                plugins[entry.qualified] = registry.load(entry, where="hooks")
            except PluginError as error:
                problems.append(f"{error}, or {_way_out(entry.dist)}.")
        if problems:
            raise PluginError("\n".join(problems))
        return cls(plugins, trace=registry.trace)

    @property
    def names(self) -> list[str]:
        """The observers, as `dist/name`, sorted."""
        return sorted(name for name, _ in self._manager.list_name_plugin())

    def emit(self, event: Event) -> None:
        """Calls the event's hook of every observer."""
        failures = []
        for name, call in self._listeners[event.hook]:
            try:
                self._call_one(event.hook, name, call, event)
            except SlimeError as error:
                if not isinstance(event, RunEnd):
                    raise
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise PluginError("\n".join(map(str, failures))) from ExceptionGroup(
                "observers failed at run_end", failures
            )

    def _call_one(self, hook: str, name: str, call: Callable[..., Any], event: object) -> None:
        started = time.perf_counter()
        with held() as failed:
            call(event)
        if self._trace is not None:
            self._trace(f"hook {hook} {name} {1000 * (time.perf_counter() - started):.1f} ms")
        if failed.raised is not None:
            fix = f"Fix it, or {_way_out(name.partition('/')[0])}."
            raise_as(PluginError, f'observer "{name}", {hook}', failed.raised, fix)

    def _observers(self, hook: str) -> Sequence[tuple[str, Callable[..., None]]]:
        # pluggy would call them all and report only that one failed; called one by one, each failure has a name. pluggy
        # calls the last one first, and keeps tryfirst at the end.
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return [
            (implementation.plugin_name, functools.partial(_call, implementation))
            for implementation in reversed(caller.get_hookimpls())
        ]

    def _register(self, name: str, plugin: object) -> list[str]:
        with held() as failed:
            observer = plugin() if isinstance(plugin, type) else plugin
        if failed.raised is not None:
            return [f"hook module {name}: the class cannot be made without arguments: {error_text(failed.raised)}."]
        # By identity: pluggy would ask for equality, which an observer may define.
        known = next((other for other, there in self._manager.list_name_plugin() if there is observer), None)
        if known is not None:
            return [f"hook module {name}: is the same object as {known}; register it once."]
        try:
            self._manager.register(observer, name)
        except pluggy.PluginValidationError as error:
            return [f"hook module {name}: {' '.join(str(error).split())}. Hooks take one parameter, event."]
        callers = self._manager.get_hookcallers(observer) or []
        if not callers:
            return [f"hook module {name}: no function is marked with slime_core.contracts.hookspecs.hookimpl."]
        return [
            f"hook module {name}: {problem}"
            for caller in callers
            for implementation in caller.get_hookimpls()
            if implementation.plugin is observer and (problem := _problem(caller, implementation))
        ]


def _call(implementation: pluggy.HookImpl, event: object) -> None:
    """Calls an observer with the event, or without it if it takes no argument."""
    implementation.function(*([event] if implementation.argnames else []))


def _way_out(dist: str) -> str:
    if dist.endswith(".py"):
        return f"leave out --plugin {dist}"
    return f"switch it off with {DENY_VARIABLE}={dist}"


def _problem(caller: pluggy.HookCaller, implementation: pluggy.HookImpl) -> str:
    """A problem that pluggy does not report; empty if there is none."""
    if not caller.has_spec():
        if implementation.optionalhook:
            return ""
        close = near_matches(caller.name, HOOK_NAMES)
        matched = f"; close match: {', '.join(close)}" if close else ""
        return f"unknown hook {caller.name}{matched}. Available: {', '.join(HOOK_NAMES)}."
    if implementation.kwargnames:
        return f"{caller.name} has a default for {', '.join(implementation.kwargnames)}, which is then never filled."
    if implementation.wrapper or implementation.hookwrapper:
        return f"{caller.name} is a wrapper; observers have nothing to wrap: take the event and return."
    if inspect.iscoroutinefunction(implementation.function) or inspect.isgeneratorfunction(implementation.function):
        return f"{caller.name} is async or a generator, so its body would never run: write a plain def."
    return ""
