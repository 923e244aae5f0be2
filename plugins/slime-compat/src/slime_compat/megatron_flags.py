"""Flags of Megatron-LM, at 1dcf0da (that of upstream slime at 624b824): those that upstream's scripts use, and near ones.

Names are without the leading dashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slime_compat.known_flags import Missing
from slime_compat.option_kinds import Kind

SHAPE_WORDS: Final = """
    num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels
    swiglu untie-embeddings-and-output-weights vocab-size padded-vocab-size make-vocab-size-divisible-by rotary-base
    rotary-percent rotary-interleaved use-rotary-position-embeddings position-embedding-type no-position-embedding
    rope-type rotary-scaling-factor use-rope-scaling rope-scaling-factor original-max-position-embeddings beta-fast
    beta-slow mscale mscale-all-dim normalization norm-epsilon layernorm-epsilon disable-bias-linear add-qkv-bias
    qk-layernorm num-experts moe-ffn-hidden-size moe-layer-freq moe-router-topk moe-router-score-function
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-num-groups moe-router-group-topk
    moe-router-topk-scaling-factor moe-shared-expert-intermediate-size moe-shared-expert-gate multi-latent-attention
    q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim no-rope-fusion apply-layernorm-1p
    max-position-embeddings seq-length spec post-self-attn-layernorm post-mlp-layernorm use-gated-attention
    attention-output-gate no-masked-softmax-fusion hidden-dropout attention-dropout linear-num-value-heads
    linear-num-key-heads linear-key-head-dim linear-value-head-dim linear-conv-kernel-dim full-attention-interval
    mtp-num-layers model-name tokenizer-type tokenizer-model
"""
SHAPE: Final = frozenset(SHAPE_WORDS.split())
"""The model's shape and tokenizer, which slime reads from the model's folder."""

OPTIONS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(
        (
            "bf16",
            "fp16",
            "gradient-accumulation-fusion",
            "moe-enable-deepep",
            "moe-grouped-gemm",
            "moe-permute-fusion",
            "moe-router-fusion",
            "moe-shared-expert-overlap",
            "optimizer-cpu-offload",
            "overlap-cpu-optimizer-d2h-h2d",
            "overlap-grad-reduce",
            "sequence-parallel",
            "use-distributed-optimizer",
            "use-precision-aware-optimizer",
        ),
        Kind.SWITCH,
    ),
    **dict.fromkeys(
        (
            "context-parallel-size",
            "expert-model-parallel-size",
            "expert-tensor-parallel-size",
            "log-probs-chunk-size",
            "num-layers-in-first-pipeline-stage",
            "num-layers-in-last-pipeline-stage",
            "pipeline-model-parallel-size",
            "recompute-num-layers",
            "tensor-model-parallel-size",
            "virtual-pipeline-model-parallel-size",
        ),
        Kind.INTEGER,
    ),
    **dict.fromkeys(
        (
            "moe-aux-loss-coeff",
            "moe-router-bias-update-rate",
            "moe-z-loss-coeff",
            "mtp-loss-scaling-factor",
            "optimizer-offload-fraction",
        ),
        Kind.NUMBER,
    ),
    **dict.fromkeys(
        (
            "exp-avg-dtype",
            "exp-avg-sq-dtype",
            "main-params-dtype",
            "moe-router-dtype",
            "moe-router-load-balancing-type",
            "moe-token-dispatcher-type",
            "recompute-granularity",
            "recompute-method",
        ),
        Kind.TEXT,
    ),
    **dict.fromkeys(("freeze-params-name-list", "only-train-params-name-list", "recompute-modules"), Kind.TEXTS),
}
"""Options that keep their names in the backend megatron; also those that upstream adds to Megatron's."""

RENAMED: Final = {
    "decoder-first-pipeline-num-layers": "num-layers-in-first-pipeline-stage",
    "decoder-last-pipeline-num-layers": "num-layers-in-last-pipeline-stage",
}
TRAINING: Final = frozenset(
    {
        "moe-aux-loss-coeff",
        "moe-z-loss-coeff",
        "moe-router-bias-update-rate",
        "mtp-loss-scaling-factor",
        "freeze-params-name-list",
        "only-train-params-name-list",
        "fp16",
    }
)
"""Options that change the training, so leaving them out for another backend does too."""

FLOAT8: Final = Missing(
    "training in float8 uses layers of Transformer Engine, and the backend builds Megatron's local ones",
    "leave it out: the run trains in bfloat16",
)
CAPACITY: Final = Missing(
    "experts compute all their tokens: log-probs would depend on what else is in a micro-batch", "leave it out"
)
MISSING: Final[Mapping[str, Missing]] = {
    "fp8-format": FLOAT8,
    "fp8-recipe": FLOAT8,
    "fp8-param-gather": FLOAT8,
    "moe-expert-capacity-factor": CAPACITY,
    "moe-pad-expert-input-to-capacity": CAPACITY,
}
"""Flags that have no counterpart."""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "enable-experimental": "the backend chooses its layers itself",
    "moe-token-drop-policy": "it has no effect without --moe-expert-capacity-factor",
    "ref-micro-batch-size": "log-probs do not depend on it; see train.log_probs_max_tokens_per_gpu",
}
"""Flags that are left out because the training does not depend on them, with the reason."""
