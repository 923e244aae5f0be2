"""Calls of a collector, which is a plugin."""

from __future__ import annotations

from slime_core.contracts.collector import Collector
from slime_core.errors import PluginError, RolloutError
from slime_core.registry.boundary import foreign, name_of, shown
from slime_core.rollout.context import RolloutContext
from slime_core.types.sample import SampleGroup


async def collect_groups(collector: Collector[RolloutContext], step: int, context: RolloutContext) -> list[SampleGroup]:
    """The groups of a step. RolloutError if the collector raises, PluginError if it returns something else than groups."""
    with foreign(collector, f"collect of step {step}", error=RolloutError):
        groups: object = await collector.collect(step, context)
    if not isinstance(groups, list) or not all(isinstance(group, SampleGroup) for group in groups):
        raise PluginError(
            f"{name_of(collector)}, collect of step {step}: returned {shown(groups)}; return a list of "
            f"{context.config.rollout_batch_size} SampleGroups."
        )
    return groups
