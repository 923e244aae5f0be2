"""What becomes of a finished group: filters decide, and reasons are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.errors import RolloutsExhausted
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import is_aborted, is_failed
from slime_core.types.sample import SampleGroup

FAILED = "failed"
ABORTED = "aborted"


def verdict(group: SampleGroup, context: RolloutContext, *, insufficient: bool) -> FilterDecision:
    """Whether the group is accepted; if not, why. Counted."""
    if is_failed(group):
        context.counts["rollout/failed_groups"] += 1
        return FilterDecision(keep=False, reason=FAILED)
    if is_aborted(group):
        # Nobody here asked for it: an engine ended it, and what it has is no answer.
        context.counts["rollout/aborted_groups"] += 1
        return FilterDecision(keep=False, reason=ABORTED)
    decision = judge(group, context.filters, insufficient=insufficient)
    if not decision.keep:
        context.counts[f"rollout/dynamic_filter/drop_{decision.reason}"] += 1
    elif decision.untrained:
        context.counts["rollout/dynamic_filter/untrained_samples"] += len(decision.untrained)
    return decision


def goes_back(group: SampleGroup, config: RolloutConfig) -> bool:
    """Whether the prompt of a group that was not accepted is generated from again."""
    if is_failed(group):
        return config.on_failed_group == "requeue"
    return is_aborted(group)


def judge(group: SampleGroup, filters: Sequence[GroupFilter], *, insufficient: bool) -> FilterDecision:
    """The decision of the first filter that drops the group; if none does, to keep it, without the samples that any of
    them does not want trained. `insufficient`: too few candidates remain to drop it on a filter's mere preference."""
    untrained: set[int] = set()
    for group_filter in filters:
        decision = group_filter.decide(group)
        if not decision.keep and not (decision.keep_when_insufficient and insufficient):
            return decision
        untrained.update(decision.untrained)
    return FilterDecision(keep=True, untrained=tuple(sorted(untrained)))


def marked(group: SampleGroup, untrained: Sequence[int]) -> SampleGroup:
    """The group in which these samples train nothing."""
    if not untrained:
        return group
    samples = list(group.samples)
    for position in untrained:
        samples[position] = replace(samples[position], remove_sample=True)
    return replace(group, samples=tuple(samples))


def check_limit(rejected: Counter[str], accepted: int, step: int, config: RolloutConfig) -> None:
    """RolloutsExhausted with the reasons if too many groups of a step were rejected."""
    limit = config.max_filtered_groups or 10 * config.rollout_batch_size
    if rejected.total() >= limit:
        reasons = ", ".join(f"{name} {count}" for name, count in rejected.most_common())
        raise RolloutsExhausted(
            f"step {step}: {rejected.total()} groups were rejected while {accepted} of "
            f"{config.rollout_batch_size} were accepted ({reasons}). Look at the filters and the reward, raise "
            "--max-filtered-groups, or let the run end here when nothing is left to learn: --on-exhausted finish."
        )


def data_ended(step: int) -> RolloutsExhausted:
    return RolloutsExhausted(f"step {step}: the data has ended; there is no prompt left to generate from.")
