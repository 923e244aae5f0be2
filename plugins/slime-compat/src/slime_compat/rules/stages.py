"""Rule for the stages of Megatron's pipeline."""

from __future__ import annotations

from typing import Final

from slime_compat.translation import Translation

SIZE: Final = "pipeline-model-parallel-size"
OTHER_SPLITS: Final = (
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "pipeline-model-parallel-layout",
    "virtual-pipeline-model-parallel-size",
)
"""Flags that decide how layers are split."""


def stages(translation: Translation) -> None:
    """Layers that the stages cannot share equally, with which Megatron does not start: the last stage gets fewer."""
    given = translation.given
    if translation.backend != "megatron" or SIZE not in given or any(name in given for name in OTHER_SPLITS):
        return
    layers = words[-1] if (words := given.get("num-layers")) else ""
    size = given[SIZE][-1] if given[SIZE] else ""
    if not (layers.isdecimal() and size.isdecimal()) or int(size) < 2 or int(layers) % int(size) == 0:
        return
    each = -(-int(layers) // int(size))
    last = int(layers) - (int(size) - 1) * each
    if last > 0:
        translation.put("backend.num_layers_in_last_pipeline_stage", last)
        translation.note(
            SIZE, f"{size} stages cannot share {layers} layers equally: the last one gets {last}, the others {each}"
        )
