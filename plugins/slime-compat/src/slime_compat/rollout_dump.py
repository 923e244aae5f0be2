"""Steps from dumps of upstream's `--save-debug-rollout-data`: files of torch with the fields of its samples.

They are read with `weights_only=True`: a file that needs other classes could run any code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from slime_compat.config import CompatDumpConfig
from slime_core.contracts.collector import Collector
from slime_core.errors import DataError
from slime_core.rollout.context import RolloutContext
from slime_core.types.prompt import Prompt
from slime_core.types.routed_experts import RoutedExperts, narrow
from slime_core.types.sample import Sample, SampleGroup, Status

UNREAD: Final = ("multimodal_inputs", "multimodal_train_inputs", "rollout_top_p_token_ids")
"""Fields without a counterpart, which would change the training."""


class DumpedGroups(Collector[RolloutContext]):
    def __init__(self, config: CompatDumpConfig) -> None:
        self._config = config

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        path = Path(self._config.path_of(step))
        rows = read_rows(path)
        if self._config.subsample is not None:
            kept = int(len(rows) * self._config.subsample)
            rows = [*rows[: kept // 2], *rows[len(rows) - (kept - kept // 2) :]]
        groups = groups_of(rows, path, context.config.reward_key, zero=self._config.missing_log_probs == "zero")
        if len(groups) != context.config.rollout_batch_size:
            raise DataError(
                f"{path}: it has {len(groups)} groups, and rollout.rollout_batch_size is "
                f"{context.config.rollout_batch_size}. Pass --rollout-batch-size {len(groups)}."
            )
        context.observe(step, groups, [])
        return groups


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """The samples of a file, each as a mapping. Raises DataError for a file that is none, or that would run code."""
    if not path.is_file():
        found = sorted(file.name for file in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
        raise DataError(f"{path}: no such dump. In its folder there are: {', '.join(found[:8]) or 'no such files'}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        of = f", one of them {named[1]}" if named else ""
        raise DataError(
            f"{path}: it has other objects than numbers, text and tensors{of}. Reading them could run any code, so the file is "
            "not read. Dump again without them, for example with plain lists in Sample.metadata."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    rows = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"{path}: no dump of rollouts: it must have a list `samples`, of one dict for each sample.")
    return rows


def groups_of(
    rows: Sequence[Mapping[str, Any]], path: Path, reward_key: str | None, *, zero: bool
) -> list[SampleGroup]:
    """`zero`: log-probs that are missing are 0."""
    samples = [sample_of(row, number, path, reward_key, zero=zero) for number, row in enumerate(rows)]
    groups = []
    for _, of_group in groupby(samples, key=lambda sample: sample.group_index):
        together = tuple(of_group)
        groups.append(SampleGroup(prompt=together[0].prompt, samples=together))
    indices = [group.group_index for group in groups]
    if len(set(indices)) < len(indices):
        raise DataError(f"{path}: samples of one group_index are not side by side.")
    return groups


def sample_of(row: Mapping[str, Any], number: int, path: Path, reward_key: str | None, *, zero: bool) -> Sample:
    """`number`: its place in the file. Raises DataError for a field that is missing, or does not fit the others."""
    where = f"{path}: sample {number}"
    if unread := [name for name in UNREAD if row.get(name) is not None]:
        raise DataError(f"{where}: {unread[0]} cannot be used. Only text, without top-p replay, is read.")
    group_index, index = row.get("group_index"), row.get("index")
    if not isinstance(group_index, int) or not isinstance(index, int):
        raise DataError(f"{where}: group_index = {group_index} and index = {index}: both must be numbers.")
    tokens, length = numbers(row, "tokens", np.int32, where), int(row.get("response_length", 0))
    start = len(tokens) - length
    if length < 0 or start < 1:
        raise DataError(f"{where}: {len(tokens)} tokens and a response_length of {length}: no prompt is left.")
    mask = fitting(row, "loss_mask", np.uint8, length, where)
    log_probs = fitting(row, "rollout_log_probs", np.float32, length, where)
    if log_probs is None and length and not zero:
        raise DataError(
            f"{where}: it has no rollout_log_probs. If the algorithm does not read them, pass "
            "--rollout.collector.missing-log-probs zero."
        )
    reward, parts = reward_of(row.get("reward"), reward_key, where)
    text, metadata = row.get("prompt", ""), row.get("metadata") or {}
    prompt = Prompt(
        group_index=group_index,
        text=text if isinstance(text, str) else "",
        token_ids=tokens[:start],
        label=row.get("label"),
        messages=None if isinstance(text, str) else text,
        metadata=metadata,
        origin=f"{path}:{number}",
    )
    rollout_id = row.get("rollout_id")
    return Sample(
        index=index,
        group_index=group_index,
        rollout_id=index if rollout_id is None else int(rollout_id),
        prompt=prompt,
        tokens=tokens,
        prompt_length=start,
        loss_mask=np.ones(length, np.uint8) if mask is None else mask,
        rollout_log_probs=np.zeros(length, np.float32) if log_probs is None else log_probs,
        response=str(row.get("response", "")),
        status=status_of(row.get("status"), where),
        reward=reward,
        reward_parts=parts,
        remove_sample=bool(row.get("remove_sample", False)),
        metadata=metadata,
        routed_experts=experts_of(row, len(tokens), where),
    )


def numbers(row: Mapping[str, Any], name: str, dtype: type[np.generic], where: str) -> npt.NDArray[Any]:
    """A field as an array. Upstream has lists and tensors."""
    value = row.get(name)
    try:
        found = np.asarray(value.tolist() if isinstance(value, torch.Tensor) else value)
        cast = found.astype(dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {name} must be numbers: {error}") from error
    if cast.dtype.kind != "f" and not np.array_equal(cast, found):
        raise DataError(f"{where}: {name} must be whole numbers from 0 to {np.iinfo(cast.dtype).max}.")
    return cast


def fitting(
    row: Mapping[str, Any], name: str, dtype: type[np.generic], length: int, where: str
) -> npt.NDArray[Any] | None:
    """A field with one number per token of the response; None: the sample has none."""
    if row.get(name) is None:
        return None
    found = numbers(row, name, dtype, where) if length else np.empty(0, dtype)
    if len(found) != length:
        raise DataError(f"{where}: {name} has {len(found)} numbers for {length} tokens of the response.")
    return found


def reward_of(reward: Any, key: str | None, where: str) -> tuple[float | None, dict[str, float]]:
    """The number that is trained on, and all named ones."""
    if not isinstance(reward, Mapping):
        return (None if reward is None else float(reward)), {}
    parts = {str(name): float(value) for name, value in reward.items() if isinstance(value, int | float)}
    if key not in parts:
        raise DataError(
            f"{where}: its reward has several numbers ({', '.join(parts) or 'none'}), and rollout.reward_key = {key}. Pass "
            "--reward-key with one of them."
        )
    return parts[key], parts


def status_of(value: Any, where: str) -> Status:
    if value not in set(Status):
        raise DataError(f"{where}: status = {value}: must be one of {', '.join(Status)}.")
    return Status(value)


def experts_of(row: Mapping[str, Any], num_tokens: int, where: str) -> RoutedExperts | None:
    """(T - 1, layers, top_k) of upstream's (rows, layers, top_k)."""
    if row.get("rollout_routed_experts") is None:
        return None
    found = numbers(row, "rollout_routed_experts", np.int64, where)
    if found.ndim != 3 or len(found) >= num_tokens:
        raise DataError(
            f"{where}: rollout_routed_experts has shape {found.shape} for {num_tokens} tokens: it must be (at most "
            "tokens - 1, layers, experts of a token)."
        )
    return narrow(found)
