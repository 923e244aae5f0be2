"""What becomes of a finished group: filters decide, and reasons are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.errors import RolloutError, RolloutsExhausted
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.failures import most_frequent
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


def check_limit(refused: Sequence[tuple[SampleGroup, str]], accepted: int, step: int, config: RolloutConfig) -> None:
    """RolloutsExhausted with the reasons if too many groups of a step were refused; RolloutError if most of them failed,
    which says nothing about what there is to learn."""
    if len(refused) < (config.max_filtered_groups or 10 * config.rollout_batch_size):
        return
    rejected = Counter(reason for _, reason in refused)
    reasons = ", ".join(f"{name} {count}" for name, count in rejected.most_common())
    told = (
        f"step {step}: {len(refused)} groups were rejected while {accepted} of {config.rollout_batch_size} were accepted "
        f"({reasons})."
    )
    if failure := most_frequent(group for group, reason in refused if reason == FAILED):
        text, count, total = failure
        told += (
            f" Of {total} failed answers {count} failed so: {text} (events.jsonl in the run's folder has all of them)."
        )
    if 2 * rejected[FAILED] >= len(refused):
        raise RolloutError(f"{told} Mend what fails.")
    raise RolloutsExhausted(
        f"{told} Look at the filters and the reward, raise --max-filtered-groups"
        f"{or_finish(config, ', or let the run end here when nothing is left to learn')}."
    )


def data_ended(step: int, left: int, config: RolloutConfig) -> RolloutsExhausted:
    """`left`: groups that were still to be had."""
    wanted = config.rollout_batch_size
    found = f"{left} of the {wanted} groups that a step wants are left" if left else "there is no prompt left"
    return RolloutsExhausted(
        f"step {step}: the data has ended: {found}. Give more data, or a source that begins anew at its end, or a "
        f"--rollout-batch-size that divides the number of prompts{or_finish(config, ', or let the run end here')}."
    )


def or_finish(config: RolloutConfig, said: str) -> str:
    """What to type, unless it has been typed."""
    return "" if config.on_exhausted == "finish" else f"{said}: --on-exhausted finish"
