"""DataBuffer: what goes to the rollouts next: groups that came back first, then new prompts from the source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slime_core.atomic_io.atomic_file import write_text
from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.contracts.source import DataSource
from slime_core.data.table import read_groups, write_groups
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.types.buffer_item import BufferItem, ItemKind

GROUPS_FILE: Final = "buffer.parquet"
STATE_FILE: Final = "buffer.json"
STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """What `DataBuffer.restore` needs to undo a step that did not come about."""

    items: tuple[BufferItem, ...]
    source: Mapping[str, Any]


class DataBuffer:
    """Nothing that was put in is lost: it is either in here, in the hands of who took it, or in a checkpoint."""

    def __init__(self, source: DataSource, buffer_filter: BufferFilter) -> None:
        self.source = source
        self._filter = buffer_filter
        self._items: list[BufferItem] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[BufferItem, ...]:
        """What waits, in the order in which it was added."""
        return tuple(self._items)

    def get_samples(self, num_groups: int, *, version: int = 0, max_staleness: int = 0) -> list[BufferItem]:
        """Waiting items as the buffer filter chooses them, then new prompts. Fewer than asked only if the source has
        ended. `version`, `max_staleness`: of the step that wants them."""
        places = self.choose(self.items, num_groups, version=version, max_staleness=max_staleness)
        chosen = [self._items[place] for place in places]
        gone = set(places)
        prompts = self.source.take(num_groups - len(chosen)) if len(chosen) < num_groups else []
        # Not before: a source that raises takes nothing out of here.
        self._items = [item for place, item in enumerate(self._items) if place not in gone]
        return [*chosen, *(BufferItem(prompt=prompt, kind=ItemKind.FRESH) for prompt in prompts)]

    def choose(self, items: Sequence[BufferItem], num_groups: int, *, version: int, max_staleness: int) -> list[int]:
        """Positions in `items`, as the buffer filter chooses. PluginError if they are not what it was asked for."""
        if not items:
            return []
        versions = Versions(
            trained=version, max_staleness=max_staleness, oldest=tuple(item.oldest_version for item in items)
        )
        places = self._filter.select(items, num_groups, versions)
        if len(places) > num_groups or len(set(places)) != len(places) or not set(places) <= set(range(len(items))):
            raise PluginError(
                f"buffer filter {type(self._filter).__name__} chose {places}: asked for at most {num_groups} different "
                f"positions below {len(items)}"
            )
        return places

    def add_samples(self, items: Iterable[BufferItem]) -> None:
        """Puts items at the end, in the order given. A fresh item that comes back is a returned one (`as_returned`)."""
        added = list(items)
        if fresh := [item.prompt.group_index for item in added if item.kind is ItemKind.FRESH]:
            raise ValueError(f"groups {fresh} are still marked fresh: return them with as_returned(step)")
        self._items += added

    def snapshot(self) -> BufferSnapshot:
        """Content and position as they are now."""
        return BufferSnapshot(self.items, self.source.state())

    def restore(self, snapshot: BufferSnapshot) -> None:
        """As it was at the snapshot: what was taken since is drawn again, what was added since is gone."""
        self.source.restore(snapshot.source)
        self._items = list(snapshot.items)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The source's counters, and how many items of each kind wait."""
        waiting = Counter(item.kind for item in self._items)
        kinds = (ItemKind.RETURNED, ItemKind.PARTIAL, ItemKind.SURPLUS)
        return {**self.source.metrics, **{f"rollout/buffer/num_{kind}": waiting[kind] for kind in kinds}}

    def save(self, folder: Path) -> None:
        """Writes the waiting items and the source's position into `folder`. StorageError if it cannot."""
        state = {
            "version": STATE_VERSION,
            "source": self.source.state(),
            "items": [
                {"kind": item.kind, "added_step": item.added_step, "start_rollout_id": item.start_rollout_id}
                for item in self._items
            ],
        }
        write_groups(folder / GROUPS_FILE, [item.group for item in self._items])
        write_text(folder / STATE_FILE, json.dumps(state, indent=1, allow_nan=False))

    def load(self, folder: Path) -> None:
        """Takes on the content and position that `save` wrote. CheckpointError if they are not all there."""
        state = _read_state(folder / STATE_FILE)
        try:
            groups = read_groups(folder / GROUPS_FILE)
        except DataError as error:
            raise CheckpointError(f"the data buffer's checkpoint is damaged: {error}") from error
        if len(groups) != len(state["items"]):
            raise CheckpointError(
                f"{folder}: {GROUPS_FILE} holds {len(groups)} groups and {STATE_FILE} speaks of {len(state['items'])}"
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


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the data buffer's state cannot be read from {path}: {error}") from error
    if state["version"] != STATE_VERSION:
        raise CheckpointError(f"{path} has version {state['version']} and this slime reads {STATE_VERSION}")
    return state
