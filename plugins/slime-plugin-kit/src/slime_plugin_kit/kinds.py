"""All kinds of plugin, with the properties that each must have. The list is checked against what has run: a case that was
lost, left out or skipped is a failure."""

from __future__ import annotations

from typing import Final

from slime_core import groups
from slime_plugin_kit.algorithm_kinds import ADVANTAGES, ALGORITHMS, CORRECTIONS, KL, LOSSES, SHAPING
from slime_plugin_kit.case import Case
from slime_plugin_kit.kind import Kind, prop
from slime_plugin_kit.model_kinds import BACKENDS, ENGINES, LAUNCHERS, OPTIMIZERS
from slime_plugin_kit.rollout_kinds import (
    BUFFER_FILTERS,
    COLLECTORS,
    FILTERS,
    GENERATORS,
    MEDIA,
    MIDDLEWARES,
    RENDERERS,
    REWARDS,
    SOURCES,
    TRACKERS,
    TRANSPORTS,
)


def is_part(case: Case) -> bool:
    return case.entry.group in groups.DRIVER_GROUPS


def is_driver(case: Case) -> bool:
    return is_part(case) and not case.subject.is_recipe


ENTRIES: Final = Kind(
    name="entries",
    holds=lambda subject: True,
    properties=(
        prop(
            "it_keeps_its_contract",
            "it resolves, its module imports nothing heavy, its options are documented, strict and frozen, and its "
            "distribution declares which slime-rl it needs",
            once=True,
        ),
        prop(
            "it_has_options_to_try",
            "its defaults, or the options of its examples, can be bound",
            once=True,
            applies=is_part,
        ),
        prop(
            "options_travel_to_workers",
            "a worker that gets its spec as JSON builds the same object with the same options",
            applies=is_driver,
        ),
        prop(
            "unknown_options_are_refused", "an option that it does not have is an error", once=True, applies=is_driver
        ),
    ),
)

KINDS: Final = (
    ENTRIES,
    ALGORITHMS,
    LOSSES,
    ADVANTAGES,
    SHAPING,
    KL,
    CORRECTIONS,
    FILTERS,
    BUFFER_FILTERS,
    REWARDS,
    GENERATORS,
    COLLECTORS,
    SOURCES,
    RENDERERS,
    MEDIA,
    MIDDLEWARES,
    TRACKERS,
    TRANSPORTS,
    BACKENDS,
    ENGINES,
    LAUNCHERS,
    OPTIMIZERS,
)
