"""Keywords of TRL that no rule reads, with the reason, in the order in which they are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slime_compat.peer import Unused

UNUSED: Final[Sequence[Unused]] = (
    Unused(
        keys="logging_* log_* num_completions_to_print project trackio_* disable_tqdm push_to_hub hub_* include_* "
        "hf_* debug skip_memory_metrics report_to",
        why="every step is logged; debug.print_completions_interval prints completions, slime view shows dumped rollouts",
    ),
    Unused(
        keys="per_device_eval_batch_size eval_* do_train do_eval do_predict prediction_loss_only metric_for_best_model "
        "greater_is_better load_best_model_at_end batch_eval_metrics",
        why="see docs/evaluation.md",
    ),
    Unused(
        keys="save_* resume_from_checkpoint restore_* enable_jit_checkpoint ignore_data_skip overwrite_output_dir",
        why="checkpoints have everything that a run needs to resume, and slime run resumes by itself",
    ),
    Unused(
        keys="dataloader_* remove_unused_columns accelerator_config ddp_* fsdp fsdp_config deepspeed ds3_* parallelism_config "
        "local_rank use_cpu no_cuda use_mps_device auto_find_batch_size torch_empty_cache_steps pad_to_multiple_of tf32 "
        "torch_compile* use_liger* liger_* gradient_checkpointing_kwargs bf16_full_eval fp16_full_eval full_determinism "
        "train_sampling_strategy length_column_name label_names data_seed average_tokens_across_devices use_cache "
        "cache_implementation attn_implementation dtype torch_dtype dataset_* streaming model_revision",
        why="speed, memory and the order of rows alone; the backend has its own options, see slime config explain backend",
    ),
    Unused(
        keys="vllm_* use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
        why="options of TRL's engines; those of slime's are engine.*, see slime config explain engine",
    ),
    Unused(
        keys="use_peft lora_r lora_alpha lora_dropout lora_target_modules load_in_*",
        why="set backend.lora_rank, lora_alpha and target_modules",
        trains=True,
    ),
    Unused(
        keys="model_init_kwargs disable_dropout",
        why="the model is loaded as it is in its folder, and always without dropout",
    ),
    Unused(
        keys="generation_kwargs",
        why="set what it has under rollout.rollout_*",
        trains=True,
        harmless=(None, {}),
    ),
    Unused(
        keys="sapo_* vespo_* entropy_coef_* entropy_target lr_scheduler_kwargs optim_args",
        why="an option of what is reported above, or of what is off",
    ),
    Unused(
        keys="top_entropy_quantile off_policy_mask_threshold use_adaptive_entropy multi_objective_aggregation "
        "router_aux_loss_coef cast_lm_head_to_fp32 neftune_noise_alpha max_tool_calling_iterations label_smoothing_factor "
        "optim_target_modules lr_scheduler_kwargs vllm_structured_outputs_regex",
        why="no counterpart; write a loss (slime.losses), a correction (slime.corrections) or a generator (slime.generators)",
        trains=True,
    ),
)
