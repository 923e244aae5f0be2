"""Flags of upstream slime's arguments.py, at 624b824, that are no keys of the same name. Names are without the leading dashes.

A flag that is in no table here, in those of Megatron and SGLang or in a rule, is a key of the kernel, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
    "ref-ckpt-step": "it has no effect without --ref-load",
    "opd-teacher-ckpt-step": "it has no effect without --opd-teacher-load",
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
    "custom-rollout-log-function-path": hook("a tracker (slime.trackers)", "slime-track", trains=False),
    "custom-eval-rollout-log-function-path": hook("a tracker (slime.trackers)", "slime-track", trains=False),
    "custom-model-provider-path": Missing(
        "the function's model computes logits of padded sequences, and names its weights itself; the backend trains on packed "
        "ones, and engines get weights under the names of the model's folder",
        "for another family write a bridge (slime_megatron.bridges), see slime-megatron; to train some weights only set "
        "backend.freeze_params_name_list; to change modules of the built model use --custom-megatron-before-log-prob-hook-path",
    ),
    "slime-router-middleware-paths": hook("a middleware (slime.middlewares)", "slime-router", trains=False),
    "keep-old-actor": Missing(
        "no copy of the weights that generated a rollout is kept",
        "pass --use-rollout-logprobs: the engine's log-probs are "
        "those of these weights; without it the old log-probs are of the weights before the step",
    ),
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
    "megatron-deepgemm-forward-modules": Missing("all modules compute in the same precision", "leave it out"),
    "megatron-deepgemm-moe-forward-modules": Missing("all modules compute in the same precision", "leave it out"),
    "freeze-indexer": Missing("indexers are never trained", "leave it out", trains=False),
    "gradient-accumulation-steps": Missing(
        "it follows from the batch sizes", "pass --global-batch-size and --micro-batch-size"
    ),
    "eval-max-context-len": Missing("evaluations have the run's limit", "pass --rollout-max-context-len", trains=False),
    "start-rollout-id": Missing("a resumed run knows its step", "resume with slime run run.toml --resume FOLDER"),
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
    custom-megatron-init-path custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
    custom-update-weight-post-write-path custom-loss-function-path
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
    "context_parallel_size": 1,
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
