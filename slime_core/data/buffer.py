"""DataBuffer: provides the next prompts of a rollout: waiting groups first, then new prompts from the source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.json_text import json_text
from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.contracts.source import DataSource
from slime_core.data.table import read_groups, write_groups
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.registry.boundary import foreign, name_of, require
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SampleGroup

GROUPS_FILE: Final = "buffer.parquet"
STATE_FILE: Final = "buffer.json"
STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """State for `DataBuffer.restore`, to undo a step that failed."""

    items: tuple[BufferItem, ...]
    source: Mapping[str, Any]


class DataBuffer:
    """No item is lost: it is in the buffer, in use by a step, or in a checkpoint."""

    def __init__(self, source: DataSource, buffer_filter: BufferFilter) -> None:
        self.source = source
        self._filter = buffer_filter
        self._items: list[BufferItem] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[BufferItem, ...]:
        """Waiting items, in the order in which they were added."""
        return tuple(self._items)

    def get_samples(self, num_groups: int, *, version: int = 0, max_staleness: int = 0) -> list[BufferItem]:
        """Takes waiting items that the buffer filter chooses, then new prompts; fewer than `num_groups` only if the source has
        ended. version, max_staleness: of the step that uses them."""
        places = self.choose(self.items, num_groups, version=version, max_staleness=max_staleness)
        chosen = [self._items[place] for place in places]
        gone = set(places)
        prompts = take_prompts(self.source, num_groups - len(chosen)) if len(chosen) < num_groups else []
        # After the source, so that no item is lost if it raises.
        self._items = [item for place, item in enumerate(self._items) if place not in gone]
        return [*chosen, *(BufferItem(prompt=prompt, kind=ItemKind.FRESH) for prompt in prompts)]

    def choose(self, items: Sequence[BufferItem], num_groups: int, *, version: int, max_staleness: int) -> list[int]:
        """Returns the positions in `items` that the buffer filter chooses. Raises PluginError if they are invalid."""
        if not items:
            return []
        versions = Versions(
            trained=version, max_staleness=max_staleness, oldest=tuple(item.oldest_version for item in items)
        )
        with foreign(self._filter, "select"):
            places = self._filter.select(items, num_groups, versions)
            valid = (
                len(places) <= num_groups and len(set(places)) == len(places) and set(places) <= set(range(len(items)))
            )
            required = f"a list of at most {num_groups} different positions below {len(items)}"
            require(valid, self._filter, "select", places, required)
        return places

    def add_samples(self, items: Iterable[BufferItem]) -> None:
        """Appends items in order. Convert a fresh item with `as_returned` before."""
        added = list(items)
        if fresh := [item.prompt.group_index for item in added if item.kind is ItemKind.FRESH]:
            raise ValueError(f"groups {fresh} are still marked fresh: return them with as_returned(step)")
        self._items += added

    def snapshot(self) -> BufferSnapshot:
        """Current items and position of the source."""
        with foreign(self.source, "state"):
            return BufferSnapshot(self.items, self.source.state())

    def restore(self, snapshot: BufferSnapshot) -> None:
        """Restores a snapshot: prompts taken since are drawn again, items added since are dropped."""
        with foreign(self.source, "restore"):
            self.source.restore(snapshot.source)
        self._items = list(snapshot.items)

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """Gives the source the groups of a step that is complete."""
        if type(self.source).observe is DataSource.observe:
            return
        with foreign(self.source, "observe"):
            self.source.observe(groups)
        # Now, before the step is trained: a checkpoint that cannot be written would lose what was trained.
        check_state(self.source)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The source's counters, and the number of waiting items of each kind."""
        waiting = Counter(item.kind for item in self._items)
        kinds = (ItemKind.RETURNED, ItemKind.PARTIAL, ItemKind.SURPLUS)
        with foreign(self.source, "metrics"):
            own = {name: float(value) for name, value in self.source.metrics.items()}
        return {**own, **{f"rollout/buffer/num_{kind}": waiting[kind] for kind in kinds}}

    def save(self, folder: Path) -> None:
        """Writes the waiting items and the source's position into `folder`. Raises StorageError if that fails, and PluginError
        if the source has no position."""
        try:
            position = check_state(self.source)
        except PluginError as error:
            raise PluginError(
                f"{error} Without the position no checkpoint can be written; those that are there stay."
            ) from error
        state = {
            "version": STATE_VERSION,
            "source": position,
            "items": [
                {"kind": item.kind, "added_step": item.added_step, "start_rollout_id": item.start_rollout_id}
                for item in self._items
            ],
        }
        write_groups(folder / GROUPS_FILE, [item.group for item in self._items])
        write_text(folder / STATE_FILE, json.dumps(state, indent=1, allow_nan=False))

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote. Raises CheckpointError if it is incomplete or damaged."""
        state = _read_state(folder / STATE_FILE)
        try:
            groups = read_groups(folder / GROUPS_FILE)
        except DataError as error:
            raise CheckpointError(f"the data buffer's checkpoint is damaged: {error}") from error
        if len(groups) != len(state["items"]):
            raise CheckpointError(
                f"{folder}: {GROUPS_FILE} has {len(groups)} groups but {STATE_FILE} {len(state['items'])}"
            )
        items = tuple(
            BufferItem(
                prompt=group.prompt,
                kind=ItemKind(entry["kind"]),
                samples=group.samples,
                added_step=entry["added_step"],
                start_rollout_id=entry["start_rollout_id"],
            )
            for group, entry in zip(groups, state["items"], strict=True)
        )
        self.restore(BufferSnapshot(items, state["source"]))


def check_state(source: DataSource) -> Mapping[str, Any]:
    """The source's state. PluginError if it cannot be saved."""
    with foreign(source, "state"):
        state = source.state()
        try:
            json_text(state, f"{name_of(source)}, state: the value")
        except DataError as error:
            raise PluginError(str(error)) from error
    return state


def take_prompts(source: DataSource, num_prompts: int) -> list[Prompt]:
    """The source's next prompts. PluginError if it raises or returns anything else."""
    call = f"take({num_prompts})"
    with foreign(source, call):
        prompts = source.take(num_prompts)
        require(
            isinstance(prompts, list) and len(prompts) <= num_prompts, source, call, prompts, "a list of the prompts"
        )
        for place, prompt in enumerate(prompts):
            require(isinstance(prompt, Prompt), source, f"{call}, position {place}", prompt, "a Prompt")
    return prompts


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the data buffer's state cannot be read from {path}: {error}") from error
    if state["version"] != STATE_VERSION:
        raise CheckpointError(f"{path} has version {state['version']} and this slime reads {STATE_VERSION}")
    return state
