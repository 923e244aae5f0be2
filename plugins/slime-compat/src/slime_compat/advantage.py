"""OldAdvantage: calls an old function of advantages."""

from __future__ import annotations

import numpy as np

from slime_compat.columns import by_sample, joined, rollout_data
from slime_compat.config import OldFunctionConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve, takes, wrong_form
from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs

WHERE = "algo.advantage.path"


class OldAdvantage(AdvantageEstimator):
    """The function gets the columns of the whole batch, not of one data-parallel rank, and sets advantages and returns. A
    sample without a reward has NaN in `rewards`. With a KL penalty `args.kl_coef` must be algo.kl_coef."""

    def __init__(self, config: OldFunctionConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._asked = f'{WHERE} = "{config.path}"'
        self._args = OldArgs(config.args, "algo.advantage.args")
        self._function = resolve(config.path, config.python_path, where=WHERE)
        if not takes(self._function, 2):
            raise wrong_form(config.path, self._function, WHERE, "(args, rollout_data)")

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        data = rollout_data(batch, inputs.columns, inputs.rewards)
        # Upstream's column is the estimate alone; the penalty has the coefficient in it.
        penalty = inputs.kl_penalty
        kl = np.zeros(len(batch.mask), np.float32) if penalty is None else penalty / np.float32(self._args.kl_coef)
        data["kl"] = by_sample(batch, kl)
        self._function(self._args, data)
        if missing := [name for name in ("advantages", "returns") if name not in data]:
            raise ValueError(
                f"{self._asked}: it must set rollout_data[{missing[0]!r}], a list of one tensor per sample."
            )
        return Credit(
            advantages=joined(data["advantages"], batch, self._asked, "advantages"),
            returns=joined(data["returns"], batch, self._asked, "returns"),
            sample_credit=inputs.rewards,
        )
