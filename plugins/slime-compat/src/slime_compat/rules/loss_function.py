"""The rule for a loss function by path."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.rules.hooks import path_of
from slime_compat.translation import Translation

FLAG: Final = "custom-loss-function-path"
OF_POLICY_LOSS: Final = (
    "corrections",
    "entropy_coef",
    "eps_clip",
    "eps_clip_high",
    "kl_loss_coef",
    "kl_loss_type",
    "use_kl_loss",
    "use_unbiased_kl",
)
"""Keys of `algo` that upstream's own policy loss reads, and not a function in its place."""
DEFAULTS: Final[dict[str, Any]] = {
    "calculate_per_token_loss": False,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": None,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_kl_loss": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
}
"""Upstream's, of what such a function may read from args."""


def loss_function(translation: Translation) -> None:
    """After all rules that put keys of `algo`."""
    path = path_of(translation, FLAG)
    if path is None:
        return
    if translation.given.get("loss-type") != ["custom_loss"]:
        translation.note(FLAG, "left out, since it has no effect without --loss-type custom_loss upstream")
        return
    args = {**DEFAULTS, **translation.args()}
    if args["eps_clip_high"] is None:
        args["eps_clip_high"] = args["eps_clip"]
    in_reward = translation.number("kl-coef", float, 0.0)
    name = "compat_ref" if in_reward or "use-kl-loss" in translation.given else "compat"
    algo = translation.tables["algo"]
    for key in OF_POLICY_LOSS:
        algo.pop(key, None)
    table = {"name": name, "path": path, "python_path": list(translation.line.python_path)}
    # TOML has no null.
    translation.put("algo.loss", table | {"args": {key: value for key, value in args.items() if value is not None}})
