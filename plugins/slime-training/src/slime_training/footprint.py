"""Footprint: bytes of a model, of its keys and values, and of what a decoder keeps while it is trained, from its folder.

Letters: E bytes of an element that is computed with, H hidden features, Q those of all queries, K those of all keys, F of the
MLP. Counted are the tensors that autograd keeps of one layer for one token, by reading the layers that the backends run
(norm, projections, norms of queries and keys, rotation, attention, gated MLP) and the graphs that torch.compile makes of them;
what stands around them is small and left out. The largest kernels of attention keep a number per head. So it is an estimate.
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
"""Keys of a config.json whose layers keep other tensors than those that are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of one of the layers, all alike."""

    layers: int
    hidden: int
    queries: int
    keys: int
    mlp: int
    """What a token passes: of all experts that are active for it, and the shared one."""
    vocab: int
    copies: int
    """Of each token, that are routed to experts; 0: the MLP is dense."""
    normed: bool
    """Queries and keys."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, normed: bool) -> DecoderShape:
        """From the content of a config.json, which does not say whether queries and keys are normed."""
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
    """Why a model's activations are not told; None: they are."""
    text = config.get("text_config", config)
    return next((what for key, what in NOT_COUNTED.items() if text.get(key)), None)


def untold_activations(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a backend that counts with `kept_per_token` cannot tell of this model."""
    untold = []
    if (layers := not_counted(config)) is not None:
        untold.append(f"activations: nobody has counted what layers of {layers} keep")
    if "vision_config" in config:
        untold.append("activations of images")
    return tuple(untold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes for one token of one layer."""

    whole: int
    """Until its backward."""
    checkpoint: int
    """Where it is computed again: its input."""
    work: int
    """More, while its backward runs."""
    forward: int
    """While it runs without gradient."""


def kept_per_token(
    shape: DecoderShape,
    *,
    element: int,
    fused: bool,
    split_copies: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
) -> Kept:
    """`fused`: norms, rotation and activation are each one kernel, which keeps what goes into it. `split_copies`: queries and
    keys are copied out of one product before they are normed."""
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
        # The norm's float32 input, what is normed and what is scaled; of the MLP also what the activation gives.
        norm = 4 + 2 * element
        norms, of_mlp = 2 * norm * hidden, 4 * element * mlp
        projections = (4 + element) * (queries + keys) if shape.normed else 0
    # Rotated queries and keys, values, and what attention gives.
    attention = element * 2 * (queries + keys)
    if context_parallel > 1:
        # Of each sequence a rank has an early and a late part. Each is attended to by itself, with a copy of the keys before
        # it, n + 1/2 for each of the rank's own, and what the two give is put together in one more.
        attention = element * (3 * queries + (2 * context_parallel + 1) * keys)
    # Tokens as experts get them and what they give.
    routing = 2 * element * shape.copies * hidden
    whole = norms + projections + attention + of_mlp + routing
    return Kept(
        whole=whole,
        checkpoint=element * hidden,
        work=element * (hidden + mlp),
        forward=element * (3 * hidden + max(3 * mlp, 2 * queries + 2 * keys)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWork:
    """Bytes that the head in chunks takes."""

    forward: int
    loss: int
    """With its gradients."""


def head_work(
    *, tokens: int, hidden: int, vocab: int, asked_chunk: int, element: int, fused: bool, trained: bool = True
) -> HeadWork:
    """See `slime_training.head`. `vocab`: this rank's part. `trained`: the weight has a gradient."""
    chunk = min(chunk_positions(vocab, asked_chunk), tokens)
    # Logits; where nothing is fused also their float32 form.
    logits = chunk * vocab * (element if fused else element + 4)
    rows = tokens * hidden * element
    of_weight = vocab * hidden * (4 + element) if trained else 0
    return HeadWork(forward=logits + rows, loss=logits + chunk * vocab * element + 2 * rows + of_weight)


def num_parameters(folder: Path, *, trust_remote_code: bool = False) -> int:
    """Of all weights in its files; of a folder that has only a config.json, those of transformers' causal model for it."""
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
            f"{folder}: it has no *.safetensors, and transformers makes no model of its config.json: {error}"
        ) from error
    return int(model.num_parameters())


def kv_bytes_per_token(config: Mapping[str, Any], element: int) -> int | None:
    """Keys and values of all layers, whole; None where layers hold something else."""
    if not_counted(config) is not None:
        return None
    sizes = ModelShape.from_config(config)
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * element
