"""The classes that each entry-point group takes, and the check of a loaded object."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from slime_core import API_VERSION, groups
from slime_core.contracts.advantage import AdvantageDriver, ShapingDriver
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.backend import BackendDriver
from slime_core.contracts.collector import CollectorDriver
from slime_core.contracts.converter import ConverterDriver
from slime_core.contracts.correction import CorrectionDriver
from slime_core.contracts.engine import EngineDriver
from slime_core.contracts.filter import BufferFilterDriver, FilterDriver
from slime_core.contracts.generator import GeneratorDriver
from slime_core.contracts.kl import KlDriver
from slime_core.contracts.launcher import LauncherDriver
from slime_core.contracts.loss import LossDriver
from slime_core.contracts.media import MediaDriver
from slime_core.contracts.middleware import MiddlewareDriver
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.renderer import RendererDriver
from slime_core.contracts.reward import RewardDriver
from slime_core.contracts.source import SourceDriver
from slime_core.contracts.tracker import TrackerDriver
from slime_core.contracts.transport import TransportDriver
from slime_core.errors import PluginError
from slime_core.registry.adapt import PLAIN_FORMS, as_driver, is_plain, plain_problem
from slime_core.registry.entry import KERNEL, Entry

ACCEPTED: Final[Mapping[str, tuple[type, ...]]] = {
    groups.BACKENDS: (BackendDriver,),
    groups.ENGINES: (EngineDriver,),
    groups.ALGORITHMS: (Recipe,),
    groups.ADVANTAGES: (AdvantageDriver, ShapingDriver),
    groups.LOSSES: (LossDriver,),
    groups.KL: (KlDriver,),
    groups.CORRECTIONS: (CorrectionDriver,),
    groups.REWARDS: (RewardDriver,),
    groups.FILTERS: (FilterDriver, BufferFilterDriver),
    groups.GENERATORS: (GeneratorDriver,),
    groups.COLLECTORS: (CollectorDriver,),
    groups.SOURCES: (SourceDriver,),
    groups.RENDERERS: (RendererDriver,),
    groups.MIDDLEWARES: (MiddlewareDriver,),
    groups.TRANSPORTS: (TransportDriver,),
    groups.TRACKERS: (TrackerDriver,),
    groups.CONVERTERS: (ConverterDriver,),
    groups.LAUNCHERS: (LauncherDriver,),
    groups.OPTIMIZERS: (OptimizerDriver,),
    groups.MEDIA: (MediaDriver,),
}
"""Driver classes by group; algorithms are data. Groups that plugins declare are not checked."""


def validate(entry: Entry, loaded: Any, *, where: str, expect: type | None = None) -> Any:
    """`loaded`, or a driver around it if it is a plain function or class. PluginError if it fits neither."""
    problem = version_problem(entry, loaded) or kind_problem(entry, loaded)
    if problem:
        raise PluginError(f"{where}: {problem}.")
    accepted = as_driver(entry.group, entry.name, loaded) if is_plain(entry.group, loaded) else loaded
    if expect is not None and not issubclass(accepted, expect):
        raise PluginError(f"{where}: {entry.name} of {entry.provenance} is {found(loaded)}; {a(expect)} belongs here.")
    return accepted


def version_problem(entry: Entry, loaded: Any) -> str:
    """The distribution to upgrade, if `loaded` states another version of the contracts; else empty."""
    stated = getattr(loaded, "api_version", API_VERSION)
    if stated == API_VERSION:
        return ""
    who = entry.dist if isinstance(stated, int) and stated < API_VERSION else KERNEL
    given = f"{entry.name} of {entry.provenance} speaks version {stated} of the contracts"
    return f"{given}, this {KERNEL} speaks version {API_VERSION}: upgrade {who}"


def kind_problem(entry: Entry, loaded: Any) -> str:
    """A sentence with what was found and what the group takes, if they differ; else empty."""
    accepted = ACCEPTED.get(entry.group)
    if accepted is None:
        return ""
    given = f"{entry.name} of {entry.provenance} ({entry.target})"
    if is_plain(entry.group, loaded):
        problem = plain_problem(entry.group, loaded)
        return f"{given} does not fit: {problem}" if problem else ""
    if isinstance(loaded, Recipe) and Recipe in accepted:
        return ""
    if isinstance(loaded, type) and issubclass(loaded, accepted) and Recipe not in accepted:
        missing = sorted(getattr(loaded, "__abstractmethods__", ()))
        return f"{given} does not implement {', '.join(missing)}" if missing else ""
    requested = " or ".join(f"{a(cls)}{' instance' if cls is Recipe else ' class'}" for cls in accepted)
    plain = f", or a plain {PLAIN_FORMS[entry.group].signature}" if entry.group in PLAIN_FORMS else ""
    return f"{given} is {found(loaded)}; {entry.group} takes {requested}{plain}"


def found(loaded: Any) -> str:
    """A description of `loaded` by the class of the contracts that it is."""
    known = [cls for accepted in ACCEPTED.values() for cls in accepted]
    if isinstance(loaded, type):
        base = next((cls for cls in known if issubclass(loaded, cls)), None)
        return f"{a(base)} class" if base else f"the class {loaded.__name__}"
    if kind := next((cls for cls in known if isinstance(loaded, cls)), None):
        return f"{a(kind)} instance"
    if inspect.isroutine(loaded):
        return f"the function {loaded.__name__}"
    return f"an object of type {type(loaded).__name__}"


def a(cls: type) -> str:
    """The name of a class after an article."""
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"
