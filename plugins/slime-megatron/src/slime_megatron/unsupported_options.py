"""Options of Megatron-core 0.16 that the backend refuses, and why: they would do nothing here, or change the model, which would
then differ from its config.json and from the model that the engine runs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

from slime_core.errors import ConfigError

TRANSFORMER_ENGINE: Final = "it is a part of Transformer Engine's layers, and the backend builds Megatron's local ones"
ATTENTION: Final = "attention over packed sequences is the backend's own, which it does not reach"
FORM: Final = "it changes what the model computes, and the engine computes what config.json defines"
NOISE: Final = "the trainer would compute another function than the engine"
INFERENCE: Final = "it is for generating text with Megatron, which the engine does here"
GRAPHS: Final = "CUDA graphs require micro-batches of one length"
LABELS: Final = "the language-model head is the backend's own"
FSDP: Final = "it is a part of Megatron's FSDP, which the backend does not use"
IGNORED: Final = "Megatron itself does not read it"
TIMES: Final = "the backend gives Megatron no timers"
FOLDER: Final = "weights come from the model folder"
FINITE: Final = "gradients are checked by the backend: a step that is not finite changes nothing"

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "transformer_impl",
                "fp8",
                "fp8_recipe",
                "fp8_param",
                "fp8_param_gather",
                "fp8_quantizer_factory",
                "fp8_margin",
                "fp8_interval",
                "fp8_amax_history_len",
                "fp8_amax_compute_algo",
                "fp8_wgrad",
                "fp8_dot_product_attention",
                "fp8_multi_head_attention",
                "fp4",
                "fp4_recipe",
                "fp4_param",
                "fp4_quantizer_factory",
                "tp_only_amax_red",
                "first_last_layers_bf16",
                "num_layers_at_start_in_bf16",
                "num_layers_at_end_in_bf16",
                "keep_fp8_transpose_cache",
                "reuse_grad_buf_for_mxfp8_param_ag",
                "disable_parameter_transpose_cache",
                "moe_router_padding_for_quantization",
                "moe_router_padding_for_fp8",
                "use_kitchen",
                "use_kitchen_attention",
                "kitchen_attention_backend",
                "use_te_rng_tracker",
                "use_te_activation_func",
                "batch_invariant_mode",
                "apply_rope_fusion",
                "fused_single_qkv_rope",
                "tp_comm_overlap",
                "tp_comm_bulk_wgrad",
                "tp_comm_bulk_dgrad",
                "tp_comm_overlap_ag",
                "tp_comm_overlap_rs",
                "tp_comm_overlap_rs_dgrad",
                "tp_comm_split_ag",
                "tp_comm_atomic_ag",
                "tp_comm_split_rs",
                "tp_comm_atomic_rs",
                "tp_comm_overlap_disable_qkv",
                "tp_comm_overlap_disable_fc1",
                "tp_comm_bootstrap_backend",
                "delay_wgrad_compute",
                "cpu_offloading",
                "cpu_offloading_num_layers",
                "cpu_offloading_activations",
                "cpu_offloading_weights",
                "cpu_offloading_double_buffering",
                "fine_grained_activation_offloading",
                "offload_modules",
                "min_offloaded_tensor_size",
            ),
            TRANSFORMER_ENGINE,
        ),
        **dict.fromkeys(
            (
                "cp_comm_type",
                "hybrid_context_parallel",
                "hierarchical_context_parallel_sizes",
                "max_seqlen_per_dp_cp_rank",
                "qk_clip",
                "qk_clip_alpha",
                "qk_clip_threshold",
                "log_max_attention_logit",
                "attention_softmax_in_fp32",
                "apply_query_key_layer_scaling",
                "masked_softmax_fusion",
            ),
            ATTENTION,
        ),
        **dict.fromkeys(
            (
                "softmax_type",
                "qk_l2_norm",
                "apply_residual_connection_post_layernorm",
                "glu_linear_offset",
                "activation_func_clamp_value",
                "use_fused_weighted_squared_relu",
                "no_rope_freq",
                "mrope_section",
                "moe_latent_size",
                "moe_apply_probs_on_input",
                "moe_router_topk_limited_devices",
                "heterogeneous_block_specs",
                "is_hybrid_model",
                "mamba_state_dim",
                "mamba_head_dim",
                "mamba_num_groups",
                "mamba_num_heads",
                "use_mamba_mem_eff_path",
            ),
            FORM,
        ),
        **dict.fromkeys(
            (
                "moe_expert_capacity_factor",
                "moe_pad_expert_input_to_capacity",
                "moe_token_drop_policy",
                "moe_token_dropping",
                "moe_input_jitter_eps",
                "moe_router_force_load_balancing",
            ),
            NOISE,
        ),
        **dict.fromkeys(
            (
                "flash_decode",
                "cache_mla_latents",
                "mlp_chunks_for_prefill",
                "inference_rng_tracker",
                "inference_sampling_seed",
                "inference_fuse_tp_communication",
                "use_inference_optimized_layers",
                "symmetric_ar_type",
            ),
            INFERENCE,
        ),
        **dict.fromkeys(
            (
                "cuda_graph_impl",
                "cuda_graph_scope",
                "cuda_graph_use_single_mempool",
                "cuda_graph_retain_backward_graph",
                "cuda_graph_warmup_steps",
                "enable_cuda_graph",
                "external_cuda_graph",
            ),
            GRAPHS,
        ),
        **dict.fromkeys(
            (
                "cross_entropy_loss_fusion",
                "cross_entropy_fusion_impl",
                "defer_embedding_wgrad_compute",
                "wgrad_deferral_limit",
            ),
            LABELS,
        ),
        **dict.fromkeys(
            (
                "data_parallel_sharding_strategy",
                "outer_dp_sharding_strategy",
                "gradient_reduce_div_fusion",
                "suggested_communication_unit_size",
                "preserve_fp32_weights",
                "fsdp_double_buffer",
                "fsdp_manual_registration",
                "init_model_with_meta_device",
            ),
            FSDP,
        ),
        **dict.fromkeys(("moe_extended_tp", "async_tensor_model_parallel_allreduce"), IGNORED),
        "barrier_with_L1_time": TIMES,
        **dict.fromkeys(("init_method_std", "embedding_init_method_std"), FOLDER),
        **dict.fromkeys(("check_for_nan_in_grad", "check_for_large_grads"), FINITE),
        **dict.fromkeys(
            ("overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release"),
            "its schedule calls parts of the model, without packed positions and the backend's own head",
        ),
        **dict.fromkeys(
            ("nccl_ub", "disable_symmetric_registration"), "gradient buffers are offloaded while trainers sleep"
        ),
        **dict.fromkeys(("persist_layer_norm", "memory_efficient_layer_norm"), "norms are the backend's own"),
        **dict.fromkeys(
            (
                "muon_momentum",
                "muon_split_qkv",
                "muon_use_nesterov",
                "muon_scale_mode",
                "muon_fp32_matmul_prec",
                "muon_num_ns_steps",
                "muon_tp_mode",
                "muon_extra_scale_factor",
            ),
            "train.optimizer is adam or sgd",
        ),
        **dict.fromkeys(
            ("overlap_p2p_comm", "batch_p2p_comm"),
            "virtual_pipeline_model_parallel_size decides which of them is right",
        ),
        "microbatch_group_size_per_vp_stage": "packing decides the number of micro-batches, and it may exceed it",
        "num_microbatches_with_partial_activation_checkpoints": "recompute_method = block and recompute_num_layers set it",
        "use_ring_exchange_p2p": "released versions of torch have none",
        "pipeline_model_parallel_comm_backend": "process groups are made by slime, over NCCL or gloo",
        "num_distributed_optimizer_instances": "the state is spread over all data-parallel ranks",
        "align_param_gather": "parameters are not gathered while others compute",
        "fp32_residual_connection": "the backend's norms return the dtype of their input, and layers require half precision",
        "moe_use_legacy_grouped_gemm": "grouped products are torch's own: moe_grouped_gemm sets whether they are used",
        "mtp_standalone": "Megatron sets it by itself; layers of multi-token prediction are on the last stage here",
        "moe_per_layer_logging": "the backend writes its own metrics",
        "log_num_zeros_in_grad": "the backend writes its own metrics",
        "config_logger_dir": "slime writes the run's config beside its metrics",
        "test_mode": "it checks gradients of Megatron's own initial weights",
    }
)

FULL: Final = ("recompute_granularity", "full")
SELECTIVE: Final = ("recompute_granularity", "selective")
FLEX: Final = ("moe_token_dispatcher_type", "flex")
LOSS_SCALE: Final = ("fp16", True)
OFFLOADED: Final = ("optimizer_cpu_offload", True)
NEEDS: Final[Mapping[str, tuple[str, Any]]] = MappingProxyType(
    {
        "recompute_method": FULL,
        "recompute_num_layers": FULL,
        "distribute_saved_activations": FULL,
        "recompute_modules": SELECTIVE,
        "moe_enable_deepep": FLEX,
        "moe_flex_dispatcher_backend": FLEX,
        "moe_deepep_num_sms": FLEX,
        "moe_hybridep_num_sms": FLEX,
        "loss_scale": LOSS_SCALE,
        "initial_loss_scale": LOSS_SCALE,
        "min_loss_scale": LOSS_SCALE,
        "loss_scale_window": LOSS_SCALE,
        "hysteresis": LOSS_SCALE,
        "optimizer_offload_fraction": OFFLOADED,
        "use_torch_optimizer_for_cpu_offload": OFFLOADED,
        "overlap_cpu_optimizer_d2h_h2d": OFFLOADED,
        "pin_cpu_grads": OFFLOADED,
        "pin_cpu_params": OFFLOADED,
        "activation_func_fp8_input_store": ("bias_activation_fusion", True),
        "store_param_remainders": ("use_precision_aware_optimizer", True),
        "decoupled_min_lr": ("decoupled_lr", None),
        "overlap_p2p_comm_warmup_flush": ("virtual_pipeline_model_parallel_size", None),
    }
)
"""Options that have no effect, or a wrong one, unless another is set too; with the value that it must have (None: any)."""

VALUES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "moe_router_load_balancing_type": (
            ("none", "aux_loss"),
            "seq_aux_loss treats a packed micro-batch as one sequence, which makes it aux_loss; the running means of "
            "global_aux_loss have no place in a model folder; sinkhorn computes another function than the engine",
        ),
        "moe_token_dispatcher_type": (
            ("alltoall", "flex"),
            "allgather requires micro-batches of one length",
        ),
    }
)
"""Values that work here of options for which Megatron has more, and why the other values do not."""

REQUIRES_TRANSFORMER_ENGINE: Final = ("moe_permute_fusion", "moe_router_fusion")
"""Options that call functions of Transformer Engine, without its layers. `recompute_modules` with layernorm requires it too."""


def option_problems(given: Mapping[str, Any], experts: int | None) -> list[str]:
    """Problems of the options that are set, Megatron's and the backend's. `experts`: the number that the model has, if any."""
    problems = []
    for name, (other, value) in NEEDS.items():
        there = given.get(other)
        if name in given and not (there == value if value is not None else there):
            needed = other if value is None else f"{other} = {str(value).lower()}"
            problems.append(f"backend.{name}: does nothing without backend.{needed}. Set that too, or leave it out.")
    for name, (allowed, reason) in VALUES.items():
        asked = given.get(name)
        problems += [
            f'backend.{name} = "{one}": {reason}. Set {" or ".join(allowed)}.'
            for one in (asked if isinstance(asked, list) else [asked])
            if one is not None and one not in allowed
        ]
    problems += balance_problems(given)
    if find_spec("transformer_engine") is None:
        missing = [f"{name} = true" for name in REQUIRES_TRANSFORMER_ENGINE if given.get(name)]
        missing += ['recompute_modules = "layernorm"'] if "layernorm" in (given.get("recompute_modules") or ()) else []
        problems += [
            f"backend.{option}: requires Transformer Engine, which is not installed. Leave it out."
            for option in missing
        ]
    if given.get("decoupled_weight_decay") is False and "bf16" in (
        given.get("exp_avg_dtype"),
        given.get("exp_avg_sq_dtype"),
    ):
        problems.append("backend.decoupled_weight_decay = false: with moments in bf16 the step is AdamW. Leave it out.")
    of_experts = [name for name in given if name.startswith("moe_") and given[name] not in (False, "none")]
    if of_experts and not experts:
        problems.append(f"backend.{', '.join(sorted(of_experts))}: the model has no experts. Leave it out.")
    return problems


def balance_problems(given: Mapping[str, Any]) -> list[str]:
    """Problems of the balance loss, which Megatron computes only if both its kind and its coefficient are set."""
    kind, coefficient = given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff")
    kinds = kind if isinstance(kind, list) else [kind]
    balances = any(one not in (None, "none") for one in kinds)
    weighs = any(coefficient if isinstance(coefficient, list) else [coefficient])
    if weighs and not balances:
        return [
            f"backend.moe_aux_loss_coeff = {coefficient}: does nothing without backend.moe_router_load_balancing_type = "
            "aux_loss. Set that too, or leave it out."
        ]
    return []


@contextmanager
def megatron_errors(given: Mapping[str, Any], folder: Any) -> Iterator[None]:
    """Raises Megatron's own errors about options as ConfigError. `given`: the options that are set; `folder`: where Megatron's
    code is. Errors raised by other code, such as torch's own classes, pass unchanged."""
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        # Exact classes only: their subclasses, such as out-of-memory errors and lost ranks, have nothing to do with options.
        own = (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)
        if type(error) not in own or not where.startswith(str(folder)):
            raise
        named = [name for name in sorted(given) if name in str(error)] or sorted(given)
        options = ", ".join(f"backend.{name} = {given[name]}" for name in named)
        raise ConfigError(
            f"backend: Megatron refuses these options: {str(error).rstrip(' .')}."
            + (f" Given: {options}." if options else "")
        ) from error
