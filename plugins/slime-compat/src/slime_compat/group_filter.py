"""OldFilter: calls an old dynamic sampling filter."""

from __future__ import annotations

import re

from slime_compat.config import OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve, takes, wrong_form
from slime_compat.old_sample import old_sample
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.errors import RolloutError
from slime_core.types.sample import SampleGroup


class OldFilter(GroupFilter):
    """Samples of a kept group on which the function sets `remove_sample` are not trained."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._path = config.path
        self._args = OldArgs(config.args, "rollout.filters.args")
        self._function = resolve(config.path, config.python_path, where="rollout.filters.path")
        if not takes(self._function, 2):
            raise wrong_form(config.path, self._function, "rollout.filters.path", "(args, samples)")

    def decide(self, group: SampleGroup) -> FilterDecision:
        samples = [old_sample(sample) for sample in group.samples]
        returned = self._function(self._args, samples)
        keep = getattr(returned, "keep", returned)
        # Accepts the bools of numpy and torch.
        if keep is None or isinstance(keep, str) or not hasattr(keep, "__bool__"):
            raise RolloutError(
                f'rollout.filters.path = "{self._path}": it returned {returned!r}. It must return True or False, or an '
                "object with keep and reason."
            )
        if keep:
            untrained = tuple(place for place, sample in enumerate(samples) if sample.remove_sample)
            return FilterDecision(keep=True, masked_indices=untrained)
        reason = getattr(returned, "reason", None) or self._path.rpartition(".")[2]
        # The reason is part of a metric's name.
        return FilterDecision(
            keep=False,
            reason=re.sub(r"[^\w.+-]+", "_", str(reason)),
            keep_when_insufficient=bool(getattr(returned, "keep_when_insufficient", False)),
        )
