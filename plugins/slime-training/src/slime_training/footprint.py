"""Footprint: bytes of a model, of its keys and values, and of what a decoder keeps while it is trained, from its folder.

Letters: E bytes of an element that is computed with, H hidden features, Q those of all queries, K those of all keys, F of the
MLP. Counted are the tensors that autograd keeps of one layer for one token, by reading the layers that the backends run
(norm, projections, norms of queries and keys, rotation, attention, gated MLP) and the graphs that torch.compile makes of them;
what is around them is small and left out. The largest kernels of attention keep a number per head. So it is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slime_core.algorithm.flops import ModelShape
from slime_core.data.model_folder import shapes_in
from slime_core.errors import ModelError
from slime_training.head import chunk_positions

NOT_COUNTED: Final = {
    "kv_lora_rank": "latent attention",
    "linear_num_key_heads": "linear attention",
    "full_attention_interval": "linear attention",
}
"""Keys of a config.json that name layers whose activations are not estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of one decoder layer; all layers are equal."""

    layers: int
    hidden: int
    queries: int
    keys: int
    mlp: int
    """MLP features per token: of all active experts, and the shared one."""
    vocab: int
    copies: int
    """Routed copies of each token; 0: the MLP is dense."""
    normed: bool
    """Queries and keys are normed."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, normed: bool) -> DecoderShape:
        """Reads the content of a config.json. `normed`: queries and keys are normed, which config.json does not contain."""
        config = config.get("text_config", config)
        sizes = ModelShape.from_config(config)
        routed = config.get("num_experts_per_tok") or 0
        shared = config.get("shared_expert_intermediate_size") or 0
        return cls(
            layers=sizes.num_layers,
            hidden=sizes.hidden,
            queries=sizes.num_heads * sizes.head_dim,
            keys=sizes.num_kv_heads * sizes.head_dim,
            mlp=sizes.ffn + shared,
            vocab=sizes.vocab,
            copies=routed,
            normed=normed,
        )


def not_counted(config: Mapping[str, Any]) -> str | None:
    """The kind of layers whose activations are not estimated; None: all are."""
    text = config.get("text_config", config)
    return next((what for key, what in NOT_COUNTED.items() if text.get(key)), None)


def not_estimated_activations(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Activations of this model that a backend which uses `kept_per_token` cannot estimate."""
    not_estimated = []
    if (layers := not_counted(config)) is not None:
        not_estimated.append(f"activations: not counted for layers of {layers}")
    if "vision_config" in config:
        not_estimated.append("activations of images")
    return tuple(not_estimated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes per token and layer."""

    whole: int
    """Kept until the layer's backward."""
    checkpoint: int
    """Kept if the layer is recomputed: its input."""
    work: int
    """Additional bytes while its backward runs."""
    forward: int
    """While the layer runs without gradient."""


def kept_per_token(
    shape: DecoderShape,
    *,
    element: int,
    fused: bool,
    split_copies: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
) -> ActivationBytes:
    """`fused`: norms, rotation and activation are one kernel each, which keeps its inputs. `split_copies`: queries and keys are
    copied out of one product before they are normed."""
    hidden = shape.hidden // (tensor_parallel if sequence_parallel else 1)
    queries, keys = shape.queries // tensor_parallel, -(-shape.keys // tensor_parallel)
    mlp = shape.mlp // tensor_parallel
    if fused:
        # Each norm's input and output; of the MLP gate, up and their product.
        norms, of_mlp = 4 * element * hidden, 3 * element * mlp
        projections = element * (queries + keys) if shape.normed else 0
        if split_copies and shape.normed:
            projections += element * (queries + keys)
    else:
        # The norm's float32 input, the normed and the scaled values; in the MLP also the output of the activation.
        norm = 4 + 2 * element
        norms, of_mlp = 2 * norm * hidden, 4 * element * mlp
        projections = (4 + element) * (queries + keys) if shape.normed else 0
    # Rotated queries and keys, values, and the output of attention.
    attention = element * 2 * (queries + keys)
    if context_parallel > 1:
        # A rank has an early and a late part of each sequence. Each part is attended to separately, with a copy of the keys
        # before it, n + 1/2 for each of the rank's own, and both outputs are concatenated in one more tensor.
        attention = element * (3 * queries + (2 * context_parallel + 1) * keys)
    # Inputs and outputs of the experts.
    routing = 2 * element * shape.copies * hidden
    whole = norms + projections + attention + of_mlp + routing
    return ActivationBytes(
        whole=whole,
        checkpoint=element * hidden,
        work=element * (hidden + mlp),
        forward=element * (3 * hidden + max(3 * mlp, 2 * queries + 2 * keys)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWork:
    """Bytes of the head in chunks."""

    forward: int
    loss: int
    """With the gradients."""


def head_work(
    *, tokens: int, hidden: int, vocab: int, asked_chunk: int, element: int, fused: bool, trained: bool = True
) -> HeadWork:
    """See `slime_training.head`. `vocab`: this rank's part. `trained`: the weight has a gradient."""
    chunk = min(chunk_positions(vocab, asked_chunk), tokens)
    # Logits; if nothing is fused also their float32 copy.
    logits = chunk * vocab * (element if fused else element + 4)
    rows = tokens * hidden * element
    of_weight = vocab * hidden * (4 + element) if trained else 0
    return HeadWork(forward=logits + rows, loss=logits + chunk * vocab * element + 2 * rows + of_weight)


def num_parameters(folder: Path, *, trust_remote_code: bool = False) -> int:
    """Number of parameters in the folder's files; for a folder that has only a config.json, of transformers' causal model for
    it."""
    if shapes := shapes_in(folder):
        return sum(math.prod(shape) for shape in shapes.values())
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: it has no *.safetensors, and transformers cannot build a model from its config.json: {error}"
        ) from error
    return int(model.num_parameters())


def kv_bytes_per_token(config: Mapping[str, Any], element: int) -> int | None:
    """Bytes of keys and values of all layers per token, unsharded; None if layers hold something else."""
    if not_counted(config) is not None:
        return None
    sizes = ModelShape.from_config(config)
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * element
