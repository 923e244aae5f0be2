"""Upstream flags that have no key of the same name here. Names are without the leading dashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SHAPE_WORDS: Final = """
    num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels
    swiglu untie-embeddings-and-output-weights vocab-size make-vocab-size-divisible-by rotary-base rotary-percent
    rotary-interleaved use-rotary-position-embeddings position-embedding-type rope-type rotary-scaling-factor
    use-rope-scaling rope-scaling-factor original-max-position-embeddings beta-fast beta-slow mscale mscale-all-dim
    normalization norm-epsilon layernorm-epsilon disable-bias-linear add-qkv-bias qk-layernorm num-experts
    moe-ffn-hidden-size moe-layer-freq moe-router-topk moe-router-score-function moe-router-pre-softmax
    moe-router-enable-expert-bias moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
    moe-shared-expert-intermediate-size moe-shared-expert-gate multi-latent-attention q-lora-rank kv-lora-rank
    qk-head-dim qk-pos-emb-head-dim v-head-dim no-rope-fusion apply-layernorm-1p max-position-embeddings seq-length
    spec post-self-attn-layernorm post-mlp-layernorm use-gated-attention attention-output-gate no-masked-softmax-fusion
    hidden-dropout attention-dropout linear-num-value-heads linear-num-key-heads linear-key-head-dim
    linear-value-head-dim linear-conv-kernel-dim full-attention-interval mtp-num-layers model-name tokenizer-type
    tokenizer-model
"""
SHAPE: Final = frozenset(SHAPE_WORDS.split())
"""The model's shape and tokenizer, which slime reads from the model's folder."""

MEGATRON_WORDS: Final = """
    recompute-granularity recompute-method recompute-num-layers recompute-modules moe-token-dispatcher-type
    moe-enable-deepep moe-grouped-gemm moe-permute-fusion moe-router-load-balancing-type moe-aux-loss-coeff
    moe-z-loss-coeff moe-router-dtype moe-router-bias-update-rate moe-shared-expert-overlap optimizer-cpu-offload
    optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer
    num-layers-in-first-pipeline-stage num-layers-in-last-pipeline-stage overlap-grad-reduce fp8-format fp8-recipe
    tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size virtual-pipeline-model-parallel-size
    context-parallel-size expert-model-parallel-size expert-tensor-parallel-size use-distributed-optimizer bf16 fp16
"""
MEGATRON: Final = frozenset(MEGATRON_WORDS.split())
"""Options of Megatron that keep their names in the backend megatron. They are known also where Megatron is not installed."""
RENAMED_MEGATRON: Final = {
    "decoder-first-pipeline-num-layers": "num-layers-in-first-pipeline-stage",
    "decoder-last-pipeline-num-layers": "num-layers-in-last-pipeline-stage",
}
TRAINING_MEGATRON: Final = frozenset(
    {"moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-router-bias-update-rate", "fp8-format", "fp8-recipe", "fp16"}
)
"""Options of Megatron that change the training, so leaving them out for another backend does too."""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "accumulate-allreduce-grads-in-fp32": "gradients are summed in float32 here",
    "attention-backend": "the backend chooses its attention kernel",
    "attention-softmax-in-fp32": "the backend chooses its attention kernel",
    "balance-by-flops": "micro-batches are balanced by estimated FLOPs (train.balance_data)",
    "check-weight-update-equal": "transports always compare checksums",
    "ckpt-format": "there is only one checkpoint format",
    "ci-test": "slime's test suite has these checks",
    "ci-load-grad-norm": "slime's test suite has these checks",
    "ci-save-grad-norm": "slime's test suite has these checks",
    "ci-train-rollout-logprob-abs-diff-threshold": "the difference is logged as the metric train_rollout_logprob_abs_diff",
    "ci-disable-kl-checker": "slime's test suite has these checks",
    "deterministic-mode": "every run is seeded, see `slime config explain seed`",
    "distributed-backend": "it follows from the device",
    "distributed-timeout-minutes": "the launcher detects lost ranks",
    "finetune": "a run starts with a fresh optimizer unless it resumes",
    "http-proxy": "requests go to the engines directly",
    "log-interval": "every step is logged",
    "fsdp-state-dict-cpu-offload": "checkpoints are written shard by shard",
    "memory-recorder": "see debug.record_memory_history",
    "memory-snapshot-dir": "snapshots go to profile/ in the run folder",
    "megatron-to-hf-mode": "bridges are chosen by config.json",
    "no-check-for-nan-in-loss-and-grad": "see train.on_nonfinite and max_skipped_steps",
    "no-load-optim": "a run starts with a fresh optimizer unless it resumes",
    "no-load-rng": "a run starts with its own seed unless it resumes",
    "num-data-workers": "rows are read as they are drawn",
    "num-workers": "rows are read as they are drawn",
    "rollout-global-dataset": "this is the default",
    "train-env-vars": "set them in the environment of the run",
    "transformer-impl": "Transformer Engine is used if it is installed",
    "update-weight-buffer-size": "the transport has its own bucket size, see `slime config explain bucket_bytes`",
    "slime-router-health-check-failure-threshold": "see rollout.rollout_health_check_interval",
    "slime-router-max-connections": "see rollout.concurrency",
    "slime-router-timeout": "see engine.request_timeout",
    "update-weight-delta-checksum": "an option of the transport, see `slime config explain`",
    "update-weight-delta-encoding": "an option of the transport, see `slime config explain`",
    "update-weight-disk-dir": "an option of the transport, see `slime config explain`",
    "update-weight-disk-keep-files": "an option of the transport, see `slime config explain`",
    "update-weight-local-checkpoint-dir": "an option of the transport, see `slime config explain`",
    "use-distributed-post": "requests are sent by one client",
    "use-slime-router": "the run distributes requests itself; for policies see router.middlewares",
    "data-pad-size-multiplier": "packed micro-batches are not padded",
}
"""Flags that are left out because the training does not depend on them, with the reason."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A flag that has no counterpart."""

    why: str
    what_to_do: str
    trains: bool = True
    """Whether leaving it out changes the training."""


def hook(point: str, example: str, *, trains: bool = True) -> Missing:
    return Missing("functions with this signature are not supported", f"write {point}, see {example}", trains)


MISSING: Final[Mapping[str, Missing]] = {
    "rollout-data-postprocess-path": Missing(
        "the columns of a batch are final once advantages are computed",
        "compute them in --custom-advantage-function-path, mask samples in --rollout-sample-filter-path, or read them in an "
        "observer, hook batch_ready (slime_core/contracts/hookspecs.py)",
    ),
    "custom-loss-function-path": Missing(
        "a loss gets log-probs and entropies of tokens here, not logits, and returns one number per token",
        "write a loss (slime.losses), see slime-grpo",
    ),
    "custom-rollout-log-function-path": hook("a tracker (slime.trackers)", "slime-track", trains=False),
    "custom-eval-rollout-log-function-path": hook("a tracker (slime.trackers)", "slime-track", trains=False),
    "custom-model-provider-path": Missing(
        "a model is built from its folder, and its weights go to engines under the folder's names",
        "write a bridge (slime_megatron.bridges), see slime-megatron",
    ),
    "custom-megatron-init-path": Missing(
        "no function is called in trainer processes",
        "set options of the backend; for another model write a bridge (slime_megatron.bridges)",
    ),
    "custom-megatron-before-log-prob-hook-path": Missing(
        "no function is called in trainer processes",
        "write a bridge (slime_megatron.bridges), or read the log-probs in an observer, hook batch_ready",
    ),
    "custom-megatron-before-train-step-hook-path": Missing(
        "no function is called in trainer processes",
        "choose what is trained by backend.freeze_params_name_list and only_train_params_name_list, and the optimizer by "
        "train.optimizer (slime.optimizers)",
    ),
    "custom-update-weight-post-write-path": Missing(
        "no function is called between writing weights and loading them",
        "write a transport (slime.transports), see slime-sglang; engines that share no disk with the trainers get weights by "
        "the transport direct or distributed",
        trains=False,
    ),
    "slime-router-middleware-paths": hook("a middleware (slime.middlewares)", "slime-router", trains=False),
    "keep-old-actor": Missing(
        "no copy of the weights that generated a rollout is kept",
        "pass --use-rollout-logprobs: the engine's log-probs are "
        "those of these weights; without it the old log-probs are of the weights before the step",
    ),
    "ref-ckpt-step": Missing(
        "the reference model is a Hugging Face folder", "convert that step with slime convert, and pass --ref-load"
    ),
    "opd-teacher-ckpt-step": Missing(
        "the teacher is a Hugging Face folder", "convert that step with slime convert, and pass --opd-teacher-load"
    ),
    "load-debug-rollout-data": Missing("dumps have another format", "dump again with rollout.dump_rollouts"),
    "allgather-cp": Missing("context parallelism uses the zigzag layout", "leave it out", trains=False),
    "attn-implementation": Missing("an option of the backend fsdp", "pass --backend fsdp", trains=False),
    "fsdp-cpu-offload": Missing("an option of the backend fsdp", "pass --backend fsdp", trains=False),
    "gradient-checkpointing": Missing("an option of the backend fsdp", "pass --backend fsdp", trains=False),
    "recompute-loss-function": Missing("the backend decides what it recomputes", "leave it out", trains=False),
    "release-train": Missing(
        "trainers keep their processes; what they hold on a GPU is offloaded to the host while engines use it",
        "pass --colocate, or --offload-train",
        trains=False,
    ),
    "qwen-gdn-backend": Missing("the backend has only one kernel", "leave it out", trains=False),
    "megatron-deepgemm-forward-layers": Missing("all layers compute in the same precision", "leave it out"),
    "megatron-deepgemm-moe-forward-layers": Missing("all layers compute in the same precision", "leave it out"),
    "freeze-indexer": Missing("indexers are never trained", "leave it out", trains=False),
    "gradient-accumulation-steps": Missing(
        "it follows from the batch sizes", "pass --global-batch-size and --micro-batch-size"
    ),
    "eval-max-context-len": Missing("evaluations have the run's limit", "pass --rollout-max-context-len", trains=False),
    "megatron-config-path": Missing("each role has a table in the run file", "set roles.critic.*"),
    "start-rollout-id": Missing("a resumed run knows its step", "resume with slime run run.toml --resume FOLDER"),
    "load-debug-rollout-data-subsample": Missing("dumps have another format", "dump again with rollout.dump_rollouts"),
    "load-forge-rollout-data": Missing("dumps have another format", "dump again with rollout.dump_rollouts"),
    "fetch-trajectory-retry-times": Missing("trajectories come from another service here", "see slime-buffer-service"),
    "min-batch-collection-ratio": Missing("a step always has all its groups", "see rollout.over_sampling_batch_size"),
    "rollout-task-type": Missing("trajectories come from another service here", "see slime-buffer-service"),
    "rollout-buffer-url": Missing("trajectories come from another service here", "see slime-buffer-service"),
    "disable-rollout-global-dataset": Missing(
        "a run has a data source", "write one (slime.sources), see slime-sources"
    ),
    "disable-compute-advantages-and-returns": Missing(
        "the algorithm decides", "pass an algorithm without advantages, such as --algo sft"
    ),
    "use-rollout-entropy": Missing("the entropy is computed during training", "leave it out", trains=False),
    "no-save-optim": Missing(
        "checkpoints include the optimizer, so that a run can resume", "leave it out", trains=False
    ),
    "ckpt-step": Missing(
        "it is a flag of the command", "pass it to slime run: slime run run.toml --ckpt-step N", trains=False
    ),
    "sglang-config": Missing(
        "engine groups are tables of the run file", "see engines.* and engine.servers", trains=False
    ),
    "sglang-router-ip": Missing(
        "no foreign router is used", "name the servers: --rollout-external-engine-addrs", trains=False
    ),
    "sglang-router-port": Missing(
        "no foreign router is used", "name the servers: --rollout-external-engine-addrs", trains=False
    ),
    "eval-function-path": Missing(
        "evaluation sets have a generator and a reward each, and no function for all of them",
        'set eval.datasets.NAME.generate and reward, with the plugin "compat" for a function of upstream',
        trains=False,
    ),
    "rollout-data-transport": Missing("the launcher sends the batches", "leave it out", trains=False),
    "use-stateless-adam": Missing(
        "Adam always keeps its moments", "pass --optimizer sgd for an optimizer without state"
    ),
    "reset-optimizer-states": Missing(
        "the optimizer's state is kept over the steps of a run", "leave it out, or pass --optimizer sgd, which has none"
    ),
    "loss-mask-type": Missing(
        "loss masks follow the chat template", "see the collector sft: --collector.loss-mask-type"
    ),
    "rm-url": Missing("only the reward remote calls a URL", "pass --reward remote --reward.rm-url URL", trains=False),
}

HARMLESS_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout-function-path": (
        "slime.rollout.sglang_rollout.generate_rollout",
        "slime.rollout.sft_rollout.generate_rollout",
    ),
    "start-rollout-id": ("0",),
    "eval-function-path": ("slime.rollout.sglang_rollout.generate_rollout",),
    "buffer-filter-path": ("slime.rollout.data_source.pop_first",),
    "data-source-path": (
        "slime.rollout.data_source.RolloutDataSource",
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    ),
}
"""Hook paths that name upstream's defaults, which need no translation."""
HOOKS_WORDS: Final = """
    rollout-function-path rollout-sample-hook-path rollout-sample-filter-path rollout-all-samples-process-path
    custom-reward-post-process-path custom-convert-samples-to-train-data-path custom-advantage-function-path
    custom-tis-function-path custom-pg-loss-reducer-function-path buffer-filter-path data-source-path
    """
HOOKS: Final = frozenset(HOOKS_WORDS.split())
"""Hooks by path, beside rewards, generators and filters, that the plugins compat call."""

REWARDS: Final[Mapping[str, str]] = {
    "math": "math",
    "dapo": "dapo",
    "deepscaler": "deepscaler",
    "f1": "f1",
    "gpqa": "gpqa",
    "ifbench": "ifbench",
    "remote_rm": "remote",
    "random": "random",
}
"""Upstream's --rm-type -> reward of slime."""

ARGS_BY_DEFAULT: Final[Mapping[str, Any]] = {
    "apply_chat_template": False,
    "custom_generate_function_path": None,
    "custom_rm_path": None,
    "eval_reward_key": None,
    "group_rm": False,
    "label_key": None,
    "n_samples_per_eval_prompt": 1,
    "n_samples_per_prompt": 1,
    "partial_rollout": False,
    "reward_key": None,
    "rm_type": None,
    "rm_url": None,
    "rollout_max_context_len": None,
    "rollout_max_prompt_len": None,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_server_concurrency": 512,
    "use_rollout_routing_replay": False,
}
"""Attributes of `args` that old functions read, and their values if the run file does not set them."""
