"""Models that the packed forward supports, by their config.json. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from slime_core.errors import near_matches
from slime_fsdp.causal_models import causal_model_types

# Keys of a config.json for features that the packed forward does not compute, each with the values that do not use the feature.
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attention_chunk_size": (None,),
    "index_topk": (None,),
}
WITH_IMAGES: Final = frozenset({"qwen3_vl"})
"""Model types whose images the packed forward supports."""
PACKED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
WITH_LINEAR_ATTENTION: Final = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types whose linear attention keeps packed sequences separate."""


def model_problems(model_config: Mapping[str, Any]) -> list[str]:
    model_type = model_config.get("model_type")
    if model_type is None:
        return ["the model's config.json has no model_type."]
    problems: list[str] = []
    if "auto_map" not in model_config:
        causal = causal_model_types()
        if model_type not in causal and model_type not in WITH_IMAGES:
            known = sorted(WITH_IMAGES if "vision_config" in model_config else causal)
            kind = (
                "backend fsdp trains no such model with images"
                if "vision_config" in model_config
                else ("transformers has no causal language model of that name")
            )
            close = near_matches(model_type, known) or (sorted(WITH_IMAGES) if "vision_config" in model_config else [])
            hint = f"; close: {', '.join(close)}" if close else ""
            problems.append(f'model_type = "{model_type}" in the model\'s config.json: {kind}{hint}.')
    for name, harmless in UNSUPPORTED.items():
        if (value := model_config.get(name)) not in harmless:
            problems.append(f"{name} = {value} in the model's config.json: backend fsdp does not compute it.")
    kinds = model_config.get("text_config", model_config).get("layer_types")
    return problems + layer_problems(model_type, kinds)


def layer_problems(model_type: str, kinds: Iterable[str] | None) -> list[str]:
    """`kinds`: layer_types of the config, or those that transformers derives from it."""
    packed = PACKED_LAYERS | ({"linear_attention"} if model_type in WITH_LINEAR_ATTENTION else set())
    unpacked = sorted(set(kinds or ()) - packed)
    if not unpacked:
        return []
    return [
        f"the model's config.json has layer_types {', '.join(unpacked)}: backend fsdp packs sequences only through "
        f"{' and '.join(sorted(PACKED_LAYERS))}."
    ]
