"""Settings of one optimizer step that a call passes, checked against what backend and optimizer of the run obey."""

from __future__ import annotations

import math
from typing import Final

from slime_core.config.bound import BoundRun
from slime_core.config.roles import POLICY
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import ConfigError

WORDS: Final = {
    "lr": "lr",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "clip_grad": "grad_clip",
}
"""Fields of `StepSettings`, and the arguments of `optim_step` for them."""


def step_settings(
    run: BoundRun,
    *,
    lr: float | None,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float | None,
    grad_clip: float | None,
) -> StepSettings:
    """ConfigError for values that no optimizer takes, and for settings that the run's does not obey."""
    settings = StepSettings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, clip_grad=grad_clip)
    problems = [
        f"optim_step: {word} = {value}: must be a finite number that is not below 0."
        for word, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("grad_clip", grad_clip))
        if value is not None and not (math.isfinite(value) and value >= 0)
    ]
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        problems.append(f"optim_step: betas = {betas}: must be two numbers in [0, 1).")
    given = {name for name in WORDS if getattr(settings, name) is not None}
    backend, optimizer = run.backend, run.optimizers[POLICY]
    for kind, part in (("backend", backend), ("optimizer", optimizer)):
        if lacking := sorted(WORDS[name] for name in given - part.driver.step_settings):
            obeyed = ", ".join(WORDS[name] for name in WORDS if name in part.driver.step_settings)
            problems.append(
                f'optim_step: {", ".join(lacking)}: {kind} "{part.entry.name}" takes {obeyed} from a call. Set the others in '
                "the run file (train)."
            )
    if problems:
        raise ConfigError(problems)
    return settings
