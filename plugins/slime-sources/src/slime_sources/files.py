"""FilesSource: prompts drawn from data files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from slime_core.contracts.renderer import Renderer
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, DataError
from slime_core.types.prompt import Prompt
from slime_sources.config import FilesConfig
from slime_sources.data_path import DataPath
from slime_sources.order import EpochOrder, WeightedPicks
from slime_sources.rows import RowRanges

EAGER_ROWS: Final = 50_000
"""Up to this many rows, all are checked at the start, unless the config sets `streaming`."""


@dataclass
class Stream:
    """Rows with their own epochs: all files together, or one of several weighted files."""

    rows: RowRanges
    order: EpochOrder
    usable: npt.NDArray[np.bool_] | None = None
    """(num_rows,); None: rows are only checked when they are drawn."""
    num_drawn: int = 0
    """Prompts drawn in this epoch."""
    shortest_too_long: int | None = None
    """Length of the shortest prompt that is too long, in tokens."""
    bad_row: DataError | None = None
    """The first bad row, for error messages."""


class FilesSource(DataSource):
    """The order of draws depends only on the files, the seed and the options. Rows that cannot be used are skipped in their
    place, so the order is the same whether they are checked at the start or when they are drawn.

    With weights, each draw picks a file and takes its next usable row.
    """

    def __init__(self, config: FilesConfig, renderer: Renderer, *, seed: int) -> None:
        self._config = config
        self._renderer = renderer
        self._seed = seed
        self._next_group_index = 0
        self._num_too_long = 0
        self._num_bad_rows = 0
        self._fingerprint: str | None = None
        paths = [DataPath.parse(entry.path) for entry in config.prompt_data]
        weights = [entry.weight for entry in config.prompt_data if entry.weight is not None]
        self._picks = WeightedPicks(weights or [1.0], seed=seed)
        opened = [RowRanges.open([path]) for path in paths] if weights else [RowRanges.open(paths)]
        self._streams = [
            Stream(rows, EpochOrder(len(rows), seed=seed, stream=number, shuffle=config.rollout_shuffle))
            for number, rows in enumerate(opened)
        ]
        num_rows = sum(len(stream.rows) for stream in self._streams)
        self._streaming = num_rows > EAGER_ROWS if config.streaming is None else config.streaming
        if not self._streaming:
            for stream in self._streams:
                self._check_rows(stream)

    def take(self, num_prompts: int) -> list[Prompt]:
        before = self.state()
        try:
            return [self._draw() for _ in range(num_prompts)]
        except DataError:
            # Restores the position before this call: all its rows are drawn again.
            self.restore(before)
            raise

    def state(self) -> Mapping[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "seed": self._seed,
            "next_group_index": self._next_group_index,
            "num_picks": self._picks.count,
            "num_too_long": self._num_too_long,
            "num_bad_rows": self._num_bad_rows,
            "streams": [
                {
                    "epoch": stream.order.epoch,
                    "offset": stream.order.offset,
                    "num_drawn": stream.num_drawn,
                    "shortest_too_long": stream.shortest_too_long,
                }
                for stream in self._streams
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """CheckpointError if the data, the seed, or the options that decide the order differ from those of the state."""
        now = {"fingerprint": self.fingerprint(), "seed": self._seed}
        for name, value in now.items():
            if state[name] != value:
                raise CheckpointError(
                    f"prompt_data: the {name} was {state[name]} when the checkpoint was written and is {value} now "
                    f"({', '.join(entry.path for entry in self._config.prompt_data)}): a run resumes only with the "
                    "same files, ranges, weights, shuffle and seed. Set them back, or start a new run"
                )
        self._next_group_index = state["next_group_index"]
        self._picks.move_to(state["num_picks"])
        self._num_too_long = state["num_too_long"]
        self._num_bad_rows = state["num_bad_rows"]
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.order.epoch = saved["epoch"]
            stream.order.offset = saved["offset"]
            stream.num_drawn = saved["num_drawn"]
            stream.shortest_too_long = saved["shortest_too_long"]

    @property
    def num_rows(self) -> int | None:
        """Number of usable rows, with weights of all files together. None if rows are only checked when they are drawn."""
        if not self._streaming:
            return sum(int(stream.usable.sum()) for stream in self._streams if stream.usable is not None)
        if self._config.on_bad_row == "skip" or self._renderer.max_prompt_len is not None:
            return None
        return sum(len(stream.rows) for stream in self._streams)

    def fingerprint(self) -> str:
        """Hash of the files' names (not folders), sizes and contents, and of the options that decide what is drawn.
        `on_bad_row` is not part of it, so that a run that ended at a bad row can resume and skip it."""
        if self._fingerprint is None:
            files = [
                [file.path.name, file.path.stat().st_size, file.content_hash, rows.start, rows.stop]
                for stream in self._streams
                for file, rows in stream.rows.ranges
            ]
            weights = [entry.weight for entry in self._config.prompt_data]
            content = [files, weights, self._config.rollout_shuffle]
            self._fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
        return self._fingerprint

    @property
    def metrics(self) -> Mapping[str, float]:
        """Rows that are checked at the start are counted once, others each time they are skipped."""
        return {
            "rollout/data/num_too_long": self._num_too_long,
            "rollout/data/num_bad_rows": self._num_bad_rows,
            "rollout/data/epoch": max(stream.order.epoch for stream in self._streams),
        }

    def _draw(self) -> Prompt:
        stream = self._streams[self._picks.next_stream()]
        while True:
            if stream.order.epoch_ended:
                self._check_not_useless(stream, stream.num_drawn)
                stream.num_drawn = 0
            row = stream.order.next_row()
            if stream.usable is not None and not stream.usable[row]:
                continue
            prompt = self._render(stream, row)
            if prompt is not None:
                stream.num_drawn += 1
                self._next_group_index += 1
                return prompt

    def _check_rows(self, stream: Stream) -> None:
        rows = range(len(stream.rows))
        stream.usable = np.fromiter((self._render(stream, row) is not None for row in rows), np.bool_, len(rows))
        self._check_not_useless(stream, int(stream.usable.sum()))

    def _render(self, stream: Stream, row: int) -> Prompt | None:
        """The prompt of a row. None if the row is skipped, which is counted."""
        try:
            prompt = self._renderer.render(
                stream.rows.read(row),
                group_index=self._next_group_index,
                origin=stream.rows.origin(row),
                folder=stream.rows.folder(row),
            )
        except DataError as error:
            if self._config.on_bad_row == "error":
                raise DataError(
                    f"{str(error).rstrip('.')}. Fix the row, or skip such rows: --on-bad-row skip"
                ) from error
            self._num_bad_rows += 1
            stream.bad_row = stream.bad_row or error
            return None
        if self._renderer.accepts(prompt):
            return prompt
        self._num_too_long += 1
        length = len(prompt.token_ids)
        stream.shortest_too_long = min(length, stream.shortest_too_long or length)
        return None

    def _check_not_useless(self, stream: Stream, num_usable: int) -> None:
        if num_usable:
            return
        names = ", ".join(str(file.path) for file, _ in stream.rows.ranges)
        reasons = []
        if stream.shortest_too_long is not None:
            reasons.append(f"the shortest prompt has {stream.shortest_too_long} tokens and {self._renderer.limit}")
        if stream.bad_row is not None:
            reasons.append(f"the first bad row: {stream.bad_row}")
        raise DataError(
            f"prompt_data: none of the {len(stream.rows)} rows of {names} can be used: {'; '.join(reasons)}"
        )
