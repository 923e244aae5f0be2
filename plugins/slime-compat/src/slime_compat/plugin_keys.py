"""Flags of upstream slime at 624b824 that are keys of plugins, not of the kernel. Names are without the leading dashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slime_compat.option_kinds import Kind

KEYS: Final[Mapping[str, tuple[str, Kind]]] = {
    "lr-warmup-fraction": ("train.lr_warmup_fraction", Kind.NUMBER),
    "prompt-data": ("data.prompt_data", Kind.TEXTS),
    "rollout-external-engine-addrs": ("engine.external_engine_addrs", Kind.TEXTS),
    "rollout-shuffle": ("data.rollout_shuffle", Kind.SWITCH),
    "router-policy": ("engine.router_policy", Kind.TEXT),
}
"""Flag to its key."""

OF_ALGORITHM: Final[Mapping[str, tuple[Kind, frozenset[str]]]] = {
    "disable-grpo-std-normalization": (Kind.SWITCH, frozenset({"grpo", "gspo", "cispo"})),
    "disable-rewards-normalization": (
        Kind.SWITCH,
        frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"}),
    ),
    "eps-clip-c": (Kind.NUMBER, frozenset({"grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"})),
    "gamma": (Kind.NUMBER, frozenset({"reinforce_plus_plus", "ppo"})),
    "lambd": (Kind.NUMBER, frozenset({"ppo"})),
    "value-clip": (Kind.NUMBER, frozenset({"ppo"})),
}
"""Flag to the algorithms that read it, here as upstream; its key is in `algo` under the same name."""
