"""The columns that an old conversion returns, as the samples of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from slime_compat.new_sample import SampleConversion
from slime_compat.old_sample import Sample as Old
from slime_compat.old_sample import Status
from slime_compat.written_tokens import WrittenTokens
from slime_core.errors import RolloutError
from slime_core.types.sample import Sample, SampleGroup

NEEDED: Final = ("tokens", "response_lengths", "rewards", "loss_masks")
READ: Final = frozenset({*NEEDED, "raw_reward", "truncated", "sample_indices", "rollout_ids", "rollout_log_probs"})
OF_THE_RUN: Final = frozenset({"rollout_mask_sums", "rollout_routed_experts", "round_number", "metadata", "prompt"})
"""Columns that the run has itself, or that nothing reads."""


def samples_of(columns: Any, groups: Sequence[SampleGroup], conversion: SampleConversion) -> list[SampleGroup]:
    """The groups with the samples that the columns describe. A row belongs to the sample that `sample_indices` names, or else
    to that of its place. RolloutError for columns that are missing, of another length or not supported."""
    checked(columns, conversion.asked)
    of_index: dict[int, list[Sample]] = {}
    for group in groups:
        for sample in group.samples:
            of_index.setdefault(sample.index, []).append(sample)
    in_order = [sample for group in groups for sample in group.samples]
    indices = columns.get("sample_indices") or [sample.index for sample in in_order]
    if len(indices) != len(columns["tokens"]):
        raise RolloutError(
            f"{conversion.asked}: it returned {len(columns['tokens'])} rows; set sample_indices of each."
        )
    made: dict[int, list[Sample]] = {group.group_index: [] for group in groups}
    for row, index in enumerate(indices):
        if index not in of_index:
            raise RolloutError(f"{conversion.asked}: sample_indices has {index}, which no sample of this step has.")
        # Several parts of a response have one index: they keep their order.
        parts = of_index[index]
        sample = sample_of(columns, row, parts.pop(0) if len(parts) > 1 else parts[0], conversion)
        made[sample.group_index].append(sample)
    if empty := [number for number, samples in made.items() if not samples]:
        raise RolloutError(f"{conversion.asked}: no row belongs to groups {empty}; set loss_masks to 0 instead.")
    return [replace(group, samples=tuple(made[group.group_index])) for group in groups]


def checked(columns: Any, asked: str) -> None:
    if not isinstance(columns, Mapping):
        raise RolloutError(f"{asked}: it returned {type(columns).__name__}; it must return a dict of columns.")
    if missing := [name for name in NEEDED if name not in columns]:
        raise RolloutError(f"{asked}: the columns lack {', '.join(missing)}.")
    if unknown := sorted(name for name in columns if name not in READ | OF_THE_RUN and columns[name] is not None):
        raise RolloutError(
            f"{asked}: columns {', '.join(unknown)} cannot be trained. Known: {', '.join(sorted(READ))}. A teacher's log-probs "
            "come from engines.teacher, images from data.multimodal_keys."
        )
    lengths = {name: len(columns[name]) for name in READ if columns.get(name) is not None}
    if len(set(lengths.values())) > 1:
        raise RolloutError(f"{asked}: the columns have different lengths: {lengths}.")


def sample_of(columns: Mapping[str, Any], row: int, source: Sample, conversion: SampleConversion) -> Sample:
    def value(name: str, default: Any) -> Any:
        column = columns.get(name)
        return default if column is None else column[row]

    truncated = value("truncated", None)
    status = source.status.value
    if truncated is not None and bool(truncated) != (status == Status.TRUNCATED.value):
        status = Status.TRUNCATED.value if truncated else Status.COMPLETED.value
    log_probs = value("rollout_log_probs", None)
    old = Old(
        tokens=[int(token) for token in columns["tokens"][row]],
        response_length=int(columns["response_lengths"][row]),
        response=source.raw_response,
        loss_mask=[int(number) for number in columns["loss_masks"][row]],
        rollout_log_probs=None if log_probs is None else [float(number) for number in log_probs],
        status=Status(status),
        metadata=dict(source.metadata),
        rollout_id=value("rollout_ids", source.rollout_id),
    )
    is_same = np.array_equal(old.tokens, source.tokens) and old.response_length == source.response_length
    if is_same:
        old.reward = dict(source.reward_parts) or source.reward
        made = conversion.applied(source, old)
    else:
        # Matches the tokens that the source has in common, with their log-probs and versions.
        written = WrittenTokens(source)
        made = conversion.convert(
            old,
            prompt=source.prompt,
            index=source.index,
            rollout_id=old.rollout_id,
            written=written,
            version=source.oldest_version(0),
        )
    raw = value("raw_reward", None)
    parts = dict(source.reward_parts) | ({} if raw is None else {"raw_reward": float(raw)})
    return replace(made, reward=float(columns["rewards"][row]), reward_parts=parts, span_rewards=())
