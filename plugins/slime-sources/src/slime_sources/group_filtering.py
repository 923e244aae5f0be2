"""What becomes of a finished group: filters decide, and reasons are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.errors import RolloutError, RolloutsExhausted
from slime_core.registry.boundary import foreign, require
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.failures import FAILURE, NUMBERS
from slime_core.rollout.groups import is_aborted, is_failed
from slime_core.types.sample import SampleGroup, Status

FAILED = "failed"
ABORTED = "aborted"


def apply_filters(group: SampleGroup, context: RolloutContext, *, insufficient: bool) -> FilterDecision:
    """Decides whether the group is accepted, and counts rejections by reason."""
    if is_failed(group):
        context.counts["rollout/failed_groups"] += 1
        return FilterDecision(keep=False, reason=FAILED)
    if is_aborted(group):
        # The run did not abort it: an engine did, so the response is incomplete.
        context.counts["rollout/aborted_groups"] += 1
        return FilterDecision(keep=False, reason=ABORTED)
    decision = judge(group, context.filters, insufficient=insufficient)
    if not decision.keep:
        context.counts[f"rollout/dynamic_filter/drop_{decision.reason}"] += 1
    elif decision.masked_indices:
        context.counts["rollout/dynamic_filter/untrained_samples"] += len(decision.masked_indices)
    return decision


def should_requeue(group: SampleGroup, config: RolloutConfig) -> bool:
    """True if the prompt of a rejected group is generated again."""
    if is_failed(group):
        return config.on_failed_group == "requeue"
    return is_aborted(group)


def judge(group: SampleGroup, filters: Sequence[GroupFilter], *, insufficient: bool) -> FilterDecision:
    """Returns the decision of the first filter that drops the group; if none does, one that keeps it and masks the samples
    that any filter masks. `insufficient`: too few candidates remain, so `keep_when_insufficient` applies."""
    masked: set[int] = set()
    for group_filter in filters:
        decision = decide(group_filter, group)
        if not decision.keep and not (decision.keep_when_insufficient and insufficient):
            return decision
        masked.update(decision.masked_indices)
    return FilterDecision(keep=True, masked_indices=tuple(sorted(masked)))


def decide(group_filter: GroupFilter, group: SampleGroup) -> FilterDecision:
    """PluginError, with the prompt, if the filter raises or returns something else than a decision on this group."""
    call = f"decide on {group.prompt.origin or f'group {group.group_index}'}"
    places = range(len(group.samples))
    with foreign(group_filter, call):
        decision = group_filter.decide(group)
        require(isinstance(decision, FilterDecision), group_filter, call, decision, "a FilterDecision (or a bool)")
        masked = decision.masked_indices
        require(
            all(n in places for n in masked), group_filter, call, masked, f"only masked_indices below {len(places)}"
        )
    return decision


def marked(group: SampleGroup, masked_indices: Sequence[int]) -> SampleGroup:
    """The group with these samples excluded from training."""
    if not masked_indices:
        return group
    samples = list(group.samples)
    for position in masked_indices:
        samples[position] = replace(samples[position], remove_sample=True)
    return replace(group, samples=tuple(samples))


def check_limit(refused: Sequence[tuple[SampleGroup, str]], accepted: int, step: int, config: RolloutConfig) -> None:
    """Raises RolloutsExhausted with the reasons if too many groups of a step were rejected; RolloutError if at least half of
    them failed, since the data may then still have groups to learn from."""
    is_over = len(refused) >= (config.max_filtered_groups or 10 * config.rollout_batch_size)
    may_be_alike = not accepted and config.max_filtered_groups is None and len(refused) % config.rollout_batch_size == 0
    if not is_over and not may_be_alike:
        return
    failure = most_frequent(group for group, reason in refused if reason == FAILED)
    if not is_over and (failure is None or failure[1] < sum(len(group.samples) for group, _ in refused)):
        return
    rejected = Counter(reason for _, reason in refused)
    reasons = ", ".join(f"{name} {count}" for name, count in rejected.most_common())
    message = (
        f"step {step}: {len(refused)} groups were rejected while {accepted} of {config.rollout_batch_size} were accepted "
        f"({reasons})."
    )
    if failure is not None:
        text, count, total = failure
        message += f" Of {total} failed responses {count} failed so: {text} (events.jsonl in the run's folder has all of them)."
    if 2 * rejected[FAILED] >= len(refused):
        raise RolloutError(f"{message} Fix the failing generator or reward.")
    raise RolloutsExhausted(
        f"{message} Check the filters and the reward, raise --max-filtered-groups"
        f"{or_finish(config, ', or let the run end here when nothing is left to learn')}."
    )


def data_ended(step: int, left: int, config: RolloutConfig) -> RolloutsExhausted:
    """`left`: groups that the step has."""
    requested = config.rollout_batch_size
    found = f"{left} of the {requested} groups that a step requires are left" if left else "there is no prompt left"
    return RolloutsExhausted(
        f"step {step}: the data has ended: {found}. Add data, choose a source that repeats, or set a "
        f"--rollout-batch-size that divides the number of prompts{or_finish(config, ', or let the run end here')}."
    )


def or_finish(config: RolloutConfig, hint: str) -> str:
    """`hint` with the flag to pass; empty if the run has it already."""
    return "" if config.on_exhausted == "finish" else f"{hint}: --on-exhausted finish"


def most_frequent(groups: Iterable[SampleGroup]) -> tuple[str, int, int] | None:
    """Returns the first text of the most frequent failure, its count, and the number of failed responses; None if none failed.
    Failures that differ only in numbers, such as row numbers, count as one."""
    texts = [
        str(sample.metadata[FAILURE])
        for group in groups
        for sample in group.samples
        if sample.status is Status.FAILED and FAILURE in sample.metadata
    ]
    if not texts:
        return None
    alike = [NUMBERS.sub("#", text) for text in texts]
    [(chosen, count)] = Counter(alike).most_common(1)
    return texts[alike.index(chosen)], count, len(texts)
