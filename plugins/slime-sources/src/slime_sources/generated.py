"""GeneratedSource: prompts that a function makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import xxhash

from slime_core.contracts.renderer import Renderer
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.types.prompt import Prompt
from slime_sources.config import GeneratedConfig

RowFunction: TypeAlias = Callable[[int, int], Mapping[str, Any]]
"""(row number from 0, seed) -> a mapping of columns."""
MOST_IN_VAIN = 10_000
"""Consecutive rows that may be too long."""


class GeneratedSource(DataSource):
    """Draws rows 0, 1, ... of the function. Its position is the row number."""

    def __init__(self, row: RowFunction, config: GeneratedConfig, renderer: Renderer, *, seed: int, name: str) -> None:
        self._row = row
        self._config = config
        self._renderer = renderer
        self._seed = seed
        self._name = name
        self._next_row = 0
        self._next_group_index = 0
        self._num_too_long = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        return [self._draw() for _ in range(num_prompts)]

    def _draw(self) -> Prompt:
        for _ in range(MOST_IN_VAIN):
            number = self._next_row if self._config.num_rows is None else self._next_row % self._config.num_rows
            self._next_row += 1
            row = self._row(number, self._seed)
            if not isinstance(row, Mapping):
                raise PluginError(
                    f"source {self._name}: row {number} is a {type(row).__name__}. It must be a mapping of columns."
                )
            prompt = self._renderer.render(
                row, group_index=self._next_group_index, origin=f"{self._name}, row {number}"
            )
            if self._renderer.accepts(prompt):
                self._next_group_index += 1
                return prompt
            self._num_too_long += 1
        raise DataError(
            f"source {self._name}: {MOST_IN_VAIN} consecutive prompts are too long: {self._renderer.limit}."
        )

    def state(self) -> Mapping[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "seed": self._seed,
            "next_row": self._next_row,
            "next_group_index": self._next_group_index,
            "num_too_long": self._num_too_long,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if (state.get("fingerprint"), state.get("seed")) != (self.fingerprint(), self._seed):
            raise CheckpointError(
                f"the checkpoint's prompts are not those of source {self._name}: its function, its options or the seed have "
                "changed. Set them back, or start a new run."
            )
        self._next_row = state["next_row"]
        self._next_group_index = state["next_group_index"]
        self._num_too_long = state["num_too_long"]

    @property
    def num_rows(self) -> int | None:
        return self._config.num_rows if self._renderer.max_prompt_len is None else None

    def fingerprint(self) -> str:
        """Hash of the function's source code, if it has one, and of the options."""
        function = inspect.unwrap(self._row)
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            text = ""
        return xxhash.xxh3_128_hexdigest(f"{self._name}\n{text}\n{self._config.model_dump_json()}".encode())

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"rollout/data/num_too_long": self._num_too_long}
