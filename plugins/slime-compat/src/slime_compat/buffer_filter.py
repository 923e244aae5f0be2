"""OldBufferFilter: calls an old buffer filter."""

from __future__ import annotations

from collections.abc import Sequence

from slime_compat.config import OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve, takes, wrong_form
from slime_compat.old_sample import Sample, old_prompt, old_sample
from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.errors import RolloutError
from slime_core.types.buffer_item import BufferItem


class OldBufferFilter(BufferFilter):
    """The function gets all waiting groups, and None as the rollout id, as upstream."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._asked = f'rollout.buffer_filter.path = "{config.path}"'
        self._args = OldArgs(config.args, "rollout.buffer_filter.args")
        self._function = resolve(config.path, config.python_path, where="rollout.buffer_filter.path")
        if not takes(self._function, 4):
            form = "(args, rollout_id, buffer, num_samples)"
            raise wrong_form(config.path, self._function, "rollout.buffer_filter.path", form)

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        """RolloutError if it returns other groups than those of the buffer, or removes some that it does not return."""
        groups = [old_group(item) for item in items]
        places = {id(group): place for place, group in enumerate(groups)}
        buffer = list(groups)
        chosen = self._function(self._args, None, buffer, num_groups)
        if not isinstance(chosen, list | tuple) or any(id(group) not in places for group in chosen):
            raise RolloutError(f"{self._asked}: it must return groups of the buffer, as they are in it.")
        taken = [places[id(group)] for group in chosen]
        removed = set(places.values()) - {places[id(group)] for group in buffer if id(group) in places}
        if dropped := [items[place].prompt.group_index for place in sorted(removed - set(taken))]:
            raise RolloutError(
                f"{self._asked}: it removed groups {dropped} from the buffer and did not return them. A run loses no "
                "prompt: leave them in the buffer; rollout.max_staleness and on_stale drop old ones."
            )
        return taken


def old_group(item: BufferItem) -> list[Sample]:
    """The item's samples; for one without any, a sample with the prompt alone. `metadata` has start_rollout_id."""
    samples = [old_sample(sample) for sample in item.samples] or [old_prompt(item.prompt, item.prompt.group_index)]
    for sample in samples:
        if item.start_rollout_id is not None:
            sample.metadata["start_rollout_id"] = item.start_rollout_id
    return samples
