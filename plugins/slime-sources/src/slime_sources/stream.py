"""StreamSource: rows of files that may grow, read one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import xxhash

from slime_core.contracts.renderer import Renderer
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, DataError
from slime_core.types.prompt import Prompt
from slime_sources.config import StreamConfig
from slime_sources.row_reader import Place, RowReader, open_reader

MOST_IN_VAIN: Final = 1_000_000
"""Consecutive rows that cannot be used, after which the source raises: it does not know how many rows there are."""


class StreamSource(DataSource):
    """Its position is a place in a file, and with `shuffle_rows` the places of the next rows."""

    def __init__(self, config: StreamConfig, renderer: Renderer, *, seed: int) -> None:
        self._config = config
        self._renderer = renderer
        self._seed = seed
        self._readers: list[RowReader] = [open_reader(path) for path in config.prompt_data]
        for reader in self._readers:
            if reader.next(reader.first) is None:
                raise DataError(
                    f"{reader.path}: no complete row yet. A resumed run recognizes a file by its first row. Write one, or "
                    "leave the file out."
                )
        options = f"{config.shuffle_rows} {config.at_end}"
        heads = "\n".join(reader.head for reader in self._readers)
        self._fingerprint = xxhash.xxh3_128_hexdigest(f"{heads}\n{options}".encode())
        self._file = 0
        self._place = self._readers[0].first
        self._epoch = 0
        self._window: list[tuple[int, Place]] = []
        """(file, place) of the next rows, with shuffle_rows."""
        self._num_read = 0
        """Rows read from the files so far."""
        self._num_draws = 0
        self._next_group_index = 0
        self._num_too_long = 0
        self._num_bad_rows = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        before = self.state()
        try:
            return self._take(num_prompts)
        except DataError:
            # Restores the position before this call: all its rows are drawn again.
            self.restore(before)
            raise

    def _take(self, num_prompts: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        in_vain = 0
        while len(prompts) < num_prompts:
            next_row = self._next()
            if next_row is None:
                break
            prompt = self._render(*next_row)
            in_vain = 0 if prompt is not None else in_vain + 1
            if in_vain >= MOST_IN_VAIN:
                raise DataError(f"prompt_data: {in_vain} consecutive rows cannot be used; the last: {next_row[1]}")
            if prompt is not None:
                prompts.append(prompt)
        return prompts

    def _next(self) -> tuple[int, Place] | None:
        """The next row in the order of draws; None: the data has ended."""
        if not self._config.shuffle_rows:
            return self._next_place()
        while (
            len(self._window) < self._config.shuffle_rows
            and (found := self._next_place(wrap=not self._window)) is not None
        ):
            self._window.append(found)
        if not self._window:
            return None
        words = np.random.PCG64([self._seed % 2**64, self._num_draws]).random_raw(1)
        self._num_draws += 1
        chosen = int(words[0] % len(self._window))
        # The last row moves into its place: the order of the window is part of the state.
        found = self._window[chosen]
        self._window[chosen] = self._window[-1]
        self._window.pop()
        return found

    def _next_place(self, *, wrap: bool = True) -> tuple[int, Place] | None:
        """The next row of the files. `wrap`: False stops at the end of the data, so that a window holds rows of one epoch."""
        tried = 0
        while True:
            found = self._readers[self._file].next(self._place)
            if found is not None:
                row, self._place = found
                self._num_read += 1
                return self._file, row
            if self._file + 1 < len(self._readers):
                self._file += 1
            elif self._config.at_end == "end" or not wrap or tried:
                return None
            else:
                self._file, tried = 0, 1
                self._epoch += 1
            self._place = self._readers[self._file].first

    def _render(self, file: int, place: Place) -> Prompt | None:
        """The prompt of a row. None if the row is skipped, which is counted."""
        reader = self._readers[file]
        try:
            row = reader.read(place)
            prompt = self._renderer.render(row, group_index=self._next_group_index, origin=reader.origin(place))
        except DataError as error:
            if self._config.on_bad_row == "error":
                raise DataError(
                    f"{str(error).rstrip('.')}. Fix the row, or skip such rows: --on-bad-row skip"
                ) from error
            self._num_bad_rows += 1
            return None
        if not self._renderer.accepts(prompt):
            self._num_too_long += 1
            return None
        self._next_group_index += 1
        return prompt

    def state(self) -> Mapping[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "seed": self._seed,
            "file": self._file,
            "place": list(self._place),
            "epoch": self._epoch,
            "window": [[file, list(place)] for file, place in self._window],
            "num_read": self._num_read,
            "num_draws": self._num_draws,
            "next_group_index": self._next_group_index,
            "num_too_long": self._num_too_long,
            "num_bad_rows": self._num_bad_rows,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if (state.get("fingerprint"), state.get("seed")) != (self.fingerprint(), self._seed):
            raise CheckpointError(
                f"the checkpoint was saved with other files than {', '.join(self._config.prompt_data)}, other options or "
                "another seed. Rows may be appended, but not changed. Set them back, or start a new run."
            )
        place = Place(*state["place"])
        if not self._readers[state["file"]].reaches(place):
            raise CheckpointError(
                f"{self._config.prompt_data[state['file']]} is shorter than the checkpoint's position in it."
            )
        self._file, self._place, self._epoch = state["file"], place, state["epoch"]
        self._window = [(file, Place(*where)) for file, where in state["window"]]
        self._num_read, self._num_draws = state["num_read"], state["num_draws"]
        self._next_group_index = state["next_group_index"]
        self._num_too_long, self._num_bad_rows = state["num_too_long"], state["num_bad_rows"]

    @property
    def num_rows(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        """Hash of the files' names and first rows. Appended rows do not change it."""
        return self._fingerprint

    @property
    def metrics(self) -> Mapping[str, float]:
        return {
            "rollout/data/num_too_long": self._num_too_long,
            "rollout/data/num_bad_rows": self._num_bad_rows,
            "rollout/data/epoch": self._epoch,
        }
