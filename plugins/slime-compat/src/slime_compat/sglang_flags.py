"""Options of SGLang 0.5.15, the version that upstream slime at 624b824 installs, as far as their names or values need a rule.

Every `--sglang-NAME` is an option of the engine. The engine sglang gives options that have another name in the installed
SGLang that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slime_compat.known_flags import Missing

ALIASES: Final[Mapping[str, str]] = {
    "attention-context-parallel-size": "attn_cp_size",
    "data-parallel-size": "dp_size",
    "decode-context-parallel-size": "dcp_size",
    "ep": "ep_size",
    "expert-parallel-size": "ep_size",
    "moe-data-parallel-size": "moe_dp_size",
    "pipeline-parallel-size": "pp_size",
    "speculative-draft-model": "speculative_draft_model_path",
}
"""Other names of options on SGLang's command line."""
OTHER_KEYS: Final[Mapping[str, str]] = {
    "enable-deterministic-inference": "engine.deterministic",
    "router-request-timeout-secs": "engine.request_timeout",
    "server-concurrency": "rollout.concurrency",
    "trust-remote-code": "model.trust_remote_code",
}
"""Options that the run has under a key of its own."""
LISTS: Final = frozenset(
    {
        "bucket_e2e_request_latency",
        "bucket_inter_token_latency",
        "bucket_time_to_first_token",
        "cuda_graph_bs",
        "cuda_graph_bs_decode",
        "cuda_graph_bs_prefill",
        "custom_weight_loader",
        "debug_tensor_dump_layers",
        "encoder_register_urls",
        "encoder_urls",
        "forward_hooks",
        "gc_threshold",
        "generation_tokens_buckets",
        "log_requests_target",
        "lora_paths",
        "lora_target_modules",
        "numa_node",
        "piecewise_cuda_graph_tokens",
        "prefill_delayer_forward_passes_buckets",
        "prefill_delayer_wait_seconds_buckets",
        "prompt_tokens_buckets",
        "remote_instance_weight_loader_send_weights_group_ports",
        "tokenizer_metrics_allowed_custom_labels",
        "uvicorn_access_log_exclude_prefixes",
    }
)
"""Options that are lists, also of one value."""
TEXTS: Final = frozenset(
    {
        "disaggregation_ib_device",
        "forward_pass_metrics_worker_id",
        "kv_cache_dtype",
        "mooncake_ib_device",
        "revision",
        "speculative_draft_model_revision",
    }
)
"""Options that are text, also where it looks like a number."""
BY_RUN: Final = Missing("the run decides it", "see launcher.rollout_num_gpus_per_engine", trains=False)
MISSING: Final[Mapping[str, Missing]] = {"tp-size": BY_RUN, "tensor-parallel-size": BY_RUN, "tp": BY_RUN}
