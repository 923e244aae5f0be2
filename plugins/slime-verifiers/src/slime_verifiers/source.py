"""TaskSource: the tasks of a taskset as prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

import verifiers.v1 as vf
import xxhash

from slime_core.contracts.renderer import Renderer
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, ConfigError, DataError
from slime_core.types.prompt import Prompt
from slime_sources.order import EpochOrder
from slime_verifiers.config import VerifiersTasksConfig
from slime_verifiers.library import check_tasks, check_type_parameters, failure, load_taskset

TASK: Final = "task"
"""Key of a prompt's metadata with the task's data, from which the environment rebuilds the task. `taskset` has its id."""


class TaskSource(DataSource):
    """Loads all tasks at the start. The prompts contain the text of the task; the environment decides what the model
    reads."""

    def __init__(self, config: VerifiersTasksConfig, renderer: Renderer, *, seed: int) -> None:
        self._renderer = renderer
        self._seed = seed
        self._id = config.taskset["id"]
        taskset = load_taskset(config.taskset, config.folder)
        if config.limit is None and not taskset.bounded:
            raise ConfigError(f'data.taskset = "{self._id}": this taskset is endless. Set data.limit.')
        asked = f'data.taskset = "{self._id}"'
        check_type_parameters(asked, type(taskset), type(taskset).task_type())
        try:
            tasks = list(itertools.islice(taskset, config.limit))
        except Exception as error:
            raise failure(asked, error) from error
        check_tasks(tasks, taskset, asked)
        self._rows = [self._row(task) for task in tasks]
        self._usable = [n for n in range(len(tasks)) if renderer.accepts(self._rendered(n, group_index=0))]
        if not self._usable:
            what = f"are too long: {renderer.limit}" if tasks else "are none"
            raise DataError(f'data.taskset = "{self._id}": the {len(tasks)} tasks {what}.')
        self._order = EpochOrder(len(self._usable), seed=seed, stream=0, shuffle=config.rollout_shuffle)
        self._is_shuffled = config.rollout_shuffle
        self._next_group_index = 0

    def _row(self, task: vf.Task[Any, Any, Any]) -> Mapping[str, Any]:
        data = task.data.model_dump(mode="json", exclude_none=True)
        # A task in which the user begins the conversation has no prompt: its system prompt is shown.
        shown = data.get("prompt") or data.get("system_prompt") or task.data.name or self._id
        label = data.get("answer")
        return {"input": shown, "label": label, "metadata": {"taskset": self._id, TASK: data}}

    def _rendered(self, number: int, *, group_index: int) -> Prompt:
        origin = f"{self._id}, task {number}"
        return self._renderer.render(self._rows[number], group_index=group_index, origin=origin)

    def take(self, num_prompts: int) -> list[Prompt]:
        return [self._draw() for _ in range(num_prompts)]

    def _draw(self) -> Prompt:
        prompt = self._rendered(self._usable[self._order.next_row()], group_index=self._next_group_index)
        self._next_group_index += 1
        return prompt

    def state(self) -> Mapping[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "seed": self._seed,
            "epoch": self._order.epoch,
            "offset": self._order.offset,
            "next_group_index": self._next_group_index,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if (state.get("fingerprint"), state.get("seed")) != (self.fingerprint(), self._seed):
            raise CheckpointError(
                f'data.taskset = "{self._id}": its tasks, its options or the seed are not those of the checkpoint. Set them '
                "back, or start a new run."
            )
        self._order.epoch = state["epoch"]
        self._order.offset = state["offset"]
        self._next_group_index = state["next_group_index"]

    @property
    def num_rows(self) -> int:
        return len(self._usable)

    def fingerprint(self) -> str:
        content = json.dumps([self._id, self._rows, self._is_shuffled], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(content.encode())

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"rollout/data/num_too_long": len(self._rows) - len(self._usable)}
