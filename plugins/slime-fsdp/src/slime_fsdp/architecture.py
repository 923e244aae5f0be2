"""Compares the architecture of two folders: whether a model built from one computes the other's weights correctly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from transformers import PreTrainedConfig

WITHOUT_EFFECT: Final = frozenset(
    {
        # Names and file formats.
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
        # Options of classifiers.
        *("id2label", "label2id", "num_labels", "problem_type"),
        # Options of training elsewhere; dropout is off here.
        *("initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "attention_dropout", "hidden_dropout"),
        # Options of generation.
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        # `layer_types` has their result.
        *("max_window_layers", "use_sliding_window"),
    }
)
"""Keys of a config.json that do not change log-probs. All other keys are assumed to."""


def differences(ours: PreTrainedConfig, theirs: PreTrainedConfig) -> list[str]:
    """Keys of config.json whose values change log-probs and differ, written as `text_config.rope_parameters` if nested."""
    return sorted(different(ours.to_dict(), theirs.to_dict()))


def different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    ignored = WITHOUT_EFFECT
    if not any(scales_rotation(config.get("rope_parameters")) for config in (ours, theirs)):
        ignored |= {"max_position_embeddings"}
    for key in (ours.keys() | theirs.keys()) - ignored:
        one, other = ours.get(key), theirs.get(key)
        if key.endswith("_config") and isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from (f"{key}.{inner}" for inner in different(one, other))
        elif one != other:
            yield key


def scales_rotation(parameters: Mapping[str, Any] | None) -> bool:
    """Whether the rotation depends on the number of positions. `parameters`: of all layers, or one entry for each kind of
    layer."""
    if not parameters:
        return False
    each = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return any(of_kind.get("rope_type", "default") != "default" for of_kind in each)
