"""loss_fn and loss_fn_config of a request as a loss of slime, and what it reads of a datum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from slime_tinker.errors import RequestError

Config: TypeAlias = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedLoss:
    """One loss of the SDK's documentation."""

    table: Callable[[Mapping[str, float]], Mapping[str, Any]]
    """Its name in `slime.losses` and its options there, from the numbers of loss_fn_config."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Keys of loss_fn_config, with their defaults."""
    policy: bool = True
    """It reads logprobs and advantages; False: weights."""
    masked: bool = False
    """It reads sequence_ratio_mask."""
    zero_without_advantage: bool = True
    """A position with advantage or weight 0 adds nothing to it."""


def clip_options(config: Mapping[str, float]) -> dict[str, float]:
    """Distances from 1, as slime-grpo has them."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if not low < 1 < high:
        raise RequestError(
            f"loss_fn_config: clip_low_threshold {low:g} and clip_high_threshold {high:g}: the first must be below 1 and the "
            "second above 1, since they bound a ratio."
        )
    return {"eps_clip": 1.0 - low, "eps_clip_high": high - 1.0}


THRESHOLDS: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Of ppo. Source of these and of cispo's: tutorials/202_loss_functions.py of tinker-cookbook. None of gspo is documented, which
takes those of ppo here."""
CISPO_THRESHOLDS: Final = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
"""No lower bound."""
LOSSES: Final[Mapping[str, DocumentedLoss]] = {
    "cross_entropy": DocumentedLoss(table=lambda config: {"name": "sft"}, policy=False),
    "importance_sampling": DocumentedLoss(table=lambda config: {"name": "importance_sampling"}),
    "ppo": DocumentedLoss(table=lambda config: {"name": "clip", **clip_options(config)}, options=THRESHOLDS),
    "cispo": DocumentedLoss(table=lambda config: {"name": "cispo", **clip_options(config)}, options=CISPO_THRESHOLDS),
    "dro": DocumentedLoss(
        table=lambda config: {"name": "dro", "beta": config["beta"]},
        options={"beta": 0.05},
        zero_without_advantage=False,
    ),
    "gspo": DocumentedLoss(
        table=lambda config: {"name": "sequence_clip", "token_level": True, **clip_options(config)},
        options=THRESHOLDS,
        masked=True,
    ),
}
REFUSED: Final = {
    "stable_reinforce": "its objective is not public. Pass importance_sampling, ppo or cispo",
    "custom": "custom losses run in the client: call forward_backward_custom, which sends cross_entropy",
}


def documented(name: str) -> DocumentedLoss:
    """RequestError for a loss that there is none of here."""
    if name in REFUSED:
        raise RequestError(f'loss_fn "{name}": not served here, since {REFUSED[name]}.')
    if name not in LOSSES:
        raise RequestError(f'loss_fn "{name}": unknown. There are {", ".join(LOSSES)}.')
    return LOSSES[name]


def table_of(name: str, config: Config) -> Mapping[str, Any]:
    """The table of name and options that `forward_backward` of a session takes."""
    loss = documented(name)
    numbers = dict(loss.options)
    for key, value in config.items():
        if key not in numbers:
            known = f"It has {', '.join(numbers)}" if numbers else "It has no options"
            raise RequestError(f'loss_fn_config["{key}"]: not an option of {name}. {known}.')
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise RequestError(f'loss_fn_config["{key}"] = {value!r}: must be a finite number.')
        numbers[key] = value
    if numbers.get("beta", 0.0) < 0:
        raise RequestError(f'loss_fn_config["beta"] = {numbers["beta"]:g}: must be 0 or above.')
    return loss.table(numbers)
