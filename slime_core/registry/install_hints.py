"""The only place in the kernel that knows plugins by name: the package to install for a known name that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slime_core import groups

DISTRIBUTION_OF: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    groups.BACKENDS: {"slime-fsdp": ("fsdp",), "slime-megatron": ("megatron",)},
    groups.ENGINES: {"slime-local": ("local",), "slime-sglang": ("sglang",), "slime-vllm": ("vllm",)},
    groups.ALGORITHMS: {
        "slime-grpo": ("grpo", "dr_grpo", "dapo", "gspo", "cispo"),
        "slime-ppo": ("ppo",),
        "slime-reinforce": ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"),
        "slime-distill": ("opd", "sft"),
    },
    groups.ADVANTAGES: {
        "slime-compat": ("compat", "compat_ref", "compat_values"),
        "slime-grpo": ("group_norm",),
        "slime-ppo": ("gae",),
        "slime-reinforce": ("discounted_return", "group_baseline", "leave_one_out"),
        "slime-distill": ("reverse_kl",),
    },
    groups.LOSSES: {
        "slime-compat": ("compat", "compat_ref"),
        "slime-grpo": ("clip", "sequence_clip", "cispo"),
        "slime-ppo": ("value",),
        "slime-tinker": ("dro", "importance_sampling"),
        "slime-distill": ("sft",),
    },
    groups.KL: {"slime-estimators": ("k1", "k2", "k3", "low_var_kl")},
    groups.CORRECTIONS: {
        "slime-compat": ("compat", "compat_reducer"),
        "slime-estimators": ("tis", "icepop", "mis", "opsm"),
    },
    groups.REWARDS: {
        "slime-rm-math": ("math", "dapo", "deepscaler", "gsm8k"),
        "slime-agents": ("retool",),
        "slime-compat": ("compat", "trl", "verl"),
        "slime-rm-hub": ("f1", "gpqa", "ifbench", "remote", "served", "random"),
    },
    groups.COLLECTORS: {
        "slime-compat": ("compat", "compat_dump"),
        "slime-distill": ("sft",),
        "slime-sources": ("accepted", "pool", "replay"),
    },
    groups.FILTERS: {
        "slime-compat": ("compat", "compat_buffer"),
        "slime-filters": (
            "nonzero_std",
            "pass_rate_band",
            "length",
            "overlong_filter",
            "priority",
            "fresh_first",
            "oldest_first",
        ),
    },
    groups.GENERATORS: {
        "slime-search-r1": ("search_r1",),
        "slime-agents": ("retool", "multi_agent", "openai_agent"),
        "slime-buffer-service": ("external_agents", "outside_agents"),
        "slime-verifiers": ("verifiers",),
        "slime-compat": ("compat",),
    },
    groups.SOURCES: {
        "slime-compat": ("compat",),
        "slime-sources": ("files", "stream", "curriculum", "sums"),
        "slime-verifiers": ("verifiers",),
    },
    groups.RENDERERS: {"slime-sources": ("chat",)},
    groups.MIDDLEWARES: {
        "slime-router": (
            "radix_cache",
            "load_balance",
            "priority",
            "session_affinity",
            "record",
            "retry",
            "rate_limit",
        ),
    },
    groups.TRANSPORTS: {
        "slime-local": ("direct",),
        "slime-transports": ("ipc", "distributed", "disk", "delta", "adapter", "frozen"),
    },
    groups.TRACKERS: {"slime-track": ("tensorboard", "wandb", "mlflow")},
    groups.CONVERTERS: {"slime-megatron": ("torch_dist", "hf"), "slime-quantize": ("fp8", "int4")},
    groups.LAUNCHERS: {"slime-ray": ("ray",)},
    groups.OPTIMIZERS: {"slime-optimizers": ("adamw_8bit", "muon"), "slime-training": ("adam", "sgd")},
    groups.MEDIA: {"slime-rl[images]": ("image",), "slime-rl[video]": ("video",)},
    groups.COMMANDS: {
        "slime-compat": ("compat", "compat.trl", "compat.upstream", "compat.verl"),
        "slime-models": ("convert", "models"),
        "slime-plugin-kit": ("new", "plugins.algorithms", "plugins.check", "plugins.show"),
        "slime-preflight": ("config", "doctor", "plan"),
        "slime-session": ("eval",),
        "slime-tinker": ("serve", "serve.keys", "serve.run"),
        "slime-viewer": ("compare", "view"),
    },
    groups.LIBRARY: {"slime-rollout-workers": ("rollout_workers",), "slime-session": ("open_session", "run")},
    "slime_training.hooks": {"slime-compat": ("compat",)},
    "slime_training.post_write_hooks": {"slime-compat": ("compat",)},
}
"""Group to distribution, or extra of the kernel's own, to the names that it registers."""

MOVED: Final[Mapping[str, str]] = {"slime_core.testing": "slime_plugin_kit"}
"""Packages that were moved out of the kernel, to their new names. The old names work until 0.3."""


def known_names(group: str) -> frozenset[str]:
    """Names of this group that known distributions register."""
    return frozenset(name for names in DISTRIBUTION_OF.get(group, {}).values() for name in names)


def install_hint(group: str, name: str) -> str:
    """A sentence with the distribution to install for a known name; empty for any other."""
    requested = name.replace("-", "_").lower()
    for dist, names in DISTRIBUTION_OF.get(group, {}).items():
        if requested in names:
            # A shell would take the brackets for a pattern.
            typed = f'"{dist}"' if "[" in dist else dist
            return f"{requested} comes with {dist}: pip install {typed}"
    return ""
