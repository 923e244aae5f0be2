"""Binding of an algorithm: a recipe, the run file's overrides, and a plugin for each of its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from slime_core import groups
from slime_core.config.algo import AlgoConfig
from slime_core.config.binder import Binder
from slime_core.config.bound import BoundAlgo
from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.config.roles import LOSS_KEYS
from slime_core.contracts.advantage import AdvantageDriver, ShapingDriver
from slime_core.contracts.algorithm import Recipe
from slime_core.errors import PluginError, near_matches
from slime_core.registry.options import problem_line


def bind_algo(table: PluginTable, binder: Binder) -> BoundAlgo | None:
    """A recipe under the run file's overrides: kernel keys to AlgoConfig, every other key to the parts that know it."""
    try:
        resolved = binder.registry.resolve(groups.ALGORITHMS, table.name, where="algo.name")
    except PluginError as error:
        binder.problems.append(str(error))
        return None
    recipe, asked = resolved.recipe, dict(table.options)
    merged = recipe_options(recipe) | asked
    try:
        keys = AlgoConfig.model_validate({k: v for k, v in merged.items() if k in AlgoConfig.model_fields})
    except ValidationError as error:
        binder.problems.extend(problem_line(e, AlgoConfig, merged, "slime", "algo") for e in error.errors())
        return None
    found = bind_slots(slots_of(table, keys, binder), recipe, asked, merged, binder)
    if found is None or reject_unknown(table, found, binder):
        return None
    parts = found.parts
    return BoundAlgo(
        name=table.name,
        entry=resolved.entry,
        recipe=recipe,
        keys=keys,
        advantage=parts.get("advantage"),
        advantage_terms=tuple(part for slot, part in parts.items() if slot.startswith("advantage_terms")),
        loss=parts["loss"],
        kl_loss=parts.get("kl_loss_type") if keys.with_kl_loss else None,
        kl_reward=parts.get("kl_reward_type") if keys.kl_coef else None,
        critic_loss=parts.get("critic_loss"),
        shaping=tuple(part for slot, part in parts.items() if slot.startswith("shaping")),
        corrections=tuple(part for slot, part in parts.items() if slot.startswith("corrections")),
    )


def recipe_options(recipe: Recipe) -> dict[str, Any]:
    """A recipe as options of the algo table."""
    return dict(recipe.options) | {
        "advantage": recipe.advantage,
        "loss": recipe.loss,
        "aggregation": recipe.aggregation,
        "shaping": list(recipe.shaping),
        "corrections": list(recipe.corrections),
    }


class Slot(NamedTuple):
    """A place in a recipe that a plugin fills."""

    name: str
    group: str
    table: PluginTable
    expect: type | None = None


def slots_of(table: PluginTable, keys: AlgoConfig, binder: Binder) -> list[Slot]:
    """The recipe's places that are filled. Notes a KL term that has no estimator."""
    slots = [
        *(() if keys.advantage is None else (Slot("advantage", groups.ADVANTAGES, keys.advantage, AdvantageDriver),)),
        *(
            Slot(f"advantage_terms[{n}]", groups.ADVANTAGES, t, AdvantageDriver)
            for n, t in enumerate(keys.advantage_terms)
        ),
        Slot("loss", groups.LOSSES, keys.loss),
        *(Slot(f"shaping[{n}]", groups.ADVANTAGES, t, ShapingDriver) for n, t in enumerate(keys.shaping)),
        *(Slot(f"corrections[{n}]", groups.CORRECTIONS, t) for n, t in enumerate(keys.corrections)),
    ]
    for key, requested in (("kl_loss_type", keys.with_kl_loss), ("kl_reward_type", keys.kl_coef != 0)):
        estimator = getattr(keys, key)
        if requested and estimator is None:
            names = ", ".join(entry.name for entry in binder.registry.entries(groups.KL)) or "none is installed"
            flag = key.replace("_", "-")
            binder.problems.append(
                f'algo.{key}: a KL term needs an estimator and recipe "{table.name}" names none: pass --{flag} with one of '
                f"{names}."
            )
        elif requested or (key in table.options and estimator is not None):
            # A name is resolved even where its term is off, so that a wrong name is reported now.
            slots.append(Slot(key, groups.KL, estimator))
    losses = {key: getattr(keys, key) for key in LOSS_KEYS.values()}
    return slots + [Slot(key, groups.LOSSES, loss) for key, loss in losses.items() if loss is not None]


@dataclass(frozen=True, slots=True)
class FilledSlots:
    parts: Mapping[str, BoundPlugin]
    """By slot."""
    options: frozenset[str]
    """The options of all parts."""


def bind_slots(
    slots: Sequence[Slot], recipe: Recipe, asked: Mapping[str, Any], merged: Mapping[str, Any], binder: Binder
) -> FilledSlots | None:
    """Every slot's plugin with the options that it knows; None after noting the problems of any."""
    # Options that a recipe sets for its own part are not passed to a part that replaces it.
    of_recipe = {
        "advantage": recipe.advantage,
        "loss": recipe.loss,
        "critic_loss": recipe.options.get("critic_loss"),
    }
    kernel_keys = AlgoConfig.model_fields.keys()
    known: set[str] = set()
    parts: dict[str, BoundPlugin] = {}
    for slot in slots:
        try:
            resolved = binder.registry.resolve(
                slot.group, slot.table.name, where=f"algo.{slot.name}", expect=slot.expect
            )
        except PluginError as error:
            binder.problems.append(str(error))
            continue
        fields = resolved.driver.Config.model_fields
        known |= fields.keys()
        replaced = slot.name in of_recipe and slot.table.name != of_recipe[slot.name]
        flat = {k: v for k, v in (asked if replaced else merged).items() if k in fields and k not in kernel_keys}
        part = binder.part(
            slot.group,
            PluginTable.model_validate({"name": slot.table.name} | flat | dict(slot.table.options)),
            f"algo.{slot.name}" if slot.table.options else "algo",
        )
        if part is not None:
            parts[slot.name] = part
    return FilledSlots(parts, frozenset(known)) if len(parts) == len(slots) else None


def reject_unknown(table: PluginTable, found: FilledSlots, binder: Binder) -> bool:
    """Notes the keys that neither the kernel nor a part knows. Returns True if there are any."""
    kernel_keys = AlgoConfig.model_fields.keys()
    unknown = [key for key in table.options if key not in kernel_keys and key not in found.options]
    available = sorted(kernel_keys | found.options)
    for key in unknown:
        close = near_matches(key, available)
        matched = f"; close match: {', '.join(close)}" if close else ""
        named = ", ".join(sorted({part.name for part in found.parts.values()}))
        binder.problems.append(
            f'algo.{key}: no part of "{table.name}" ({named}) has this option{matched}. Available: {", ".join(available)}.'
        )
    return bool(unknown)
