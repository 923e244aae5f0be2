"""Keys of verl that no rule reads, with the reason, in the order in which they are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slime_compat.peer import Unused

UNUSED: Final[Sequence[Unused]] = (
    Unused(
        keys="*._target_ actor_rollout_ref.hybrid_engine hydra.* *.strategy *.rollout_n critic.enable "
        "trainer.use_legacy_worker_impl trainer.device *.nccl_timeout *.forward_only *.dtype "
        "trainer.ray_wait_register_center_timeout ray_kwargs.* ray_init.* transfer_queue.* *.use_shm *.load_weight",
        why="part of verl's own machinery",
        harmless=(None, False, "", True, "cuda", "auto", "fsdp", "fsdp2", "megatron", "bfloat16"),
    ),
    Unused(
        keys="actor_rollout_ref.ref.log_prob_* actor_rollout_ref.rollout.log_prob_* critic.forward_* "
        "critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu critic.use_dynamic_bsz "
        "critic.ppo_max_token_len_per_gpu trainer.balance_batch reward_model.micro_batch_size "
        "reward_model.micro_batch_size_per_gpu reward_model.use_dynamic_bsz reward_model.forward_max_token_len_per_gpu",
        why="forwards and the critic have the micro-batches of train.max_tokens_per_gpu or train.micro_batch_size, which do "
        "not change the gradient",
    ),
    Unused(
        keys="*.param_offload *.optimizer_offload *.grad_offload *.offload_policy *.free_cache_engine *.multi_stage_wake_up "
        "*.enable_activation_offload *.layered_summon actor_rollout_ref.rollout.load_format "
        "actor_rollout_ref.rollout.checkpoint_engine.*",
        why="trainer and engines are offloaded in turns: launcher.offload_train and launcher.offload_rollout, on by default",
    ),
    Unused(
        keys="*.use_remove_padding *.use_fused_kernels *.fused_kernel_options.* *.use_liger *.use_torch_compile "
        "*.entropy_checkpointing *.entropy_from_logits_with_chunking *.forward_prefetch *.wrap_policy* *.fsdp_size "
        "*.use_orig_params *.full_determinism *.tiled_mlp.* *.attn_implementation *.torch_dtype *.reshard_after_forward "
        "*.cudagraph_capture_sizes *.use_prefix_grouper *.sum_pi_squared_checkpointing "
        "actor_rollout_ref.model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing "
        "actor_rollout_ref.ref.* critic.ulysses_sequence_parallel_size critic.model.fsdp_config.* critic.fsdp.* "
        "actor_rollout_ref.actor.fsdp_config.* critic.megatron.* actor_rollout_ref.actor.calculate_entropy",
        why="speed and memory alone: packed micro-batches without padding are the default, see backend.* for the rest. The "
        "reference and the critic have the policy's layout",
        harmless=(None, False, "", True, 1, -1),
    ),
    Unused(
        keys="actor_rollout_ref.actor.megatron.override_transformer_config.* "
        "actor_rollout_ref.actor.megatron.override_ddp_config.* actor_rollout_ref.actor.megatron.override_mcore_model_config* "
        "actor_rollout_ref.actor.megatron.sequence_parallel actor_rollout_ref.actor.megatron.use_distributed_optimizer "
        "actor_rollout_ref.actor.megatron.*mbridge* actor_rollout_ref.actor.megatron.*dist_checkpointing* "
        "*.optim.override_optimizer_config* *.optim.optimizer_impl *.optim.lr_warmup_init *.optim.weight_decay_incr_style "
        "*.optim.lr_wsd_* *.optim.use_checkpoint_opt_param_scheduler *.optim.total_training_steps *.optim.num_cycles "
        "*.optim.betas *.optim.min_lr *.optim.min_lr_ratio *.optim.lr_scheduler_type *.optim.lr_decay_style "
        "actor_rollout_ref.actor.megatron.* *.ulysses_sequence_parallel_size",
        why="options of verl's optimizer and layouts that the backend sets itself or does not have; its own are backend.*, see "
        "slime config explain backend",
        harmless=(None, False, "", True, "torch.optim", 0.0, 0.5, "constant", -1, 1, "exponential"),
    ),
    Unused(
        keys="actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.enforce_eager "
        "actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.enable_prefix_caching "
        "actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.max_num_seqs "
        "actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.disable_log_stats "
        "actor_rollout_ref.rollout.skip_* actor_rollout_ref.rollout.engine_kwargs.* "
        "actor_rollout_ref.rollout.scheduling_policy "
        "actor_rollout_ref.rollout.dtype actor_rollout_ref.rollout.prompt_length actor_rollout_ref.rollout.response_length "
        "actor_rollout_ref.rollout.logprobs_mode actor_rollout_ref.rollout.prometheus.* actor_rollout_ref.rollout.trace.* "
        "actor_rollout_ref.rollout.agent.num_workers actor_rollout_ref.rollout.data_parallel_size "
        "actor_rollout_ref.rollout.expert_parallel_size actor_rollout_ref.rollout.pipeline_model_parallel_size "
        "actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.over_sample_rate "
        "actor_rollout_ref.rollout.calculate_log_probs actor_rollout_ref.rollout.disable_mm_preprocessor_cache "
        "actor_rollout_ref.rollout.do_sample actor_rollout_ref.rollout.val_kwargs.do_sample "
        "actor_rollout_ref.rollout.limit_images actor_rollout_ref.rollout.quantization*",
        why="options of verl's engines; those of slime's are engine.*, see slime config explain engine. How responses are "
        "distributed does not depend on them",
        harmless=(None, False, "", True, "async", "auto", 0, 1),
    ),
    Unused(
        keys="actor_rollout_ref.rollout.multi_turn.enable",
        why="tools and agent loops of verl are its own classes: write a generator (slime.generators), or use openai_agent or "
        "retool",
        trains=True,
    ),
    Unused(
        keys="actor_rollout_ref.rollout.multi_turn.* data.tool_config_path actor_rollout_ref.rollout.agent.* "
        "data.return_multi_modal_inputs",
        why="tools and agent loops of verl are its own classes: write a generator (slime.generators), or use openai_agent or "
        "retool",
        trains=True,
        harmless=(None, False, "", True, "hermes", "single_turn_agent", "middle", "strict", 1, 256),
    ),
    Unused(
        keys="actor_rollout_ref.rollout.ignore_eos",
        why="responses end at the model's end token here",
        trains=True,
    ),
    Unused(
        keys="*.profiler.* global_profiler.* trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir "
        "trainer.esi_redundant_time trainer.npu_profile.* trainer.profile_steps trainer.*nsight* actor_rollout_ref.profiler.*",
        why="see docs/debugging.md and slime view: debug.*, rollout.dump_rollouts",
        harmless=(None, False, "", True, 0, "torch", [], -1),
    ),
    Unused(
        keys="*.checkpoint.* trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep "
        "trainer.resume_from_path",
        why="checkpoints have everything that a run needs to resume; hf/ is written at the end",
        harmless=(None, False, "", ["model", "optimizer", "extra"]),
    ),
    Unused(
        keys="data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.val_batch_size "
        "data.dataloader_num_workers data.filter_overlong_prompts_workers data.reward_fn_key data.use_shm data.tokenizer "
        "data.image_patch_size data.video_key data.validation_shuffle data.trust_remote_code "
        "critic.model.tokenizer_path critic.model.use_remove_padding *.data_loader_seed *.fsdp_config.seed *.megatron.seed "
        "critic.model.trust_remote_code critic.model.override_config* critic.rollout_n actor_rollout_ref.model.hf_config_path "
        "actor_rollout_ref.model.tokenizer_path reward_model.launch_reward_fn_async reward_model.num_workers "
        "reward_model.use_reward_loop reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
        "reward_model.rollout.* reward_model.model.* reward_model.max_length reward_model.reward_loop_* "
        "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_manager.* reward_model.ulysses_sequence_parallel_size "
        "critic.model.external_lib critic.optim.* critic.shuffle critic.ppo_epochs critic.ppo_max_token_len_per_gpu",
        why="no counterpart is needed: rows are read as they are drawn, and rewards run in processes of their own",
        harmless=(None, False, "", True, 0, 1, 8, 14, "videos", "data_source", "register", "naive"),
    ),
    Unused(
        keys="data.apply_chat_template_kwargs data.custom_cls.* data.sampler.* data.datagen.* data.gen_batch_size",
        why="verl's data classes are not used: write a source (slime.sources)",
        trains=True,
        harmless=(None, False, "", {}),
    ),
    Unused(
        keys="actor_rollout_ref.actor.shuffle",
        why="the mini-batches of a batch are trained in the order of its prompts",
        trains=True,
    ),
    Unused(
        keys="actor_rollout_ref.actor.freeze_vision_tower",
        why="name the frozen weights: backend.freeze_params_name_list",
        trains=True,
    ),
    Unused(
        keys="actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.tau_neg actor_rollout_ref.actor.policy_loss.* "
        "actor_rollout_ref.actor.calculate_sum_pi_squared algorithm.pf_ppo.* "
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl "
        "actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.router_replay.* trainer.resume_mode",
        why="an option of what is reported above, or of what is off",
        harmless=(None, False, "", 1.0, 1.05, 2.0, 0.0002, 5.0, 0.1, 10000, "pow"),
    ),
    Unused(
        keys="algorithm.use_pf_ppo algorithm.filter_groups.* algorithm.rollout_correction.* algorithm.optimal_token_baseline.*",
        why="set it here: rollout.filters (nonzero_std for groups with equal rewards), algo.corrections (mis, icepop) and "
        "algo.use_rollout_logprobs",
        trains=True,
        harmless=(None, False, "", "ppo_clip", 0, "acc", 2.0),
    ),
    Unused(
        keys="actor_rollout_ref.model.lora_adapter_path actor_rollout_ref.model.exclude_modules actor_rollout_ref.model.lora.*",
        why="set backend.lora_adapter_path, backend.lora_rank and backend.target_modules (backend fsdp)",
        trains=True,
        harmless=(None, False, "", 0),
    ),
    Unused(
        keys="actor_rollout_ref.model.override_config* actor_rollout_ref.model.custom_chat_template "
        "actor_rollout_ref.model.external_lib actor_rollout_ref.model.mtp* critic.model.lora_* critic.model.target_modules",
        why="the model is what is in its folder: change config.json or chat_template.jinja there",
        trains=True,
        harmless=(None, False, "", {}, 0, 16, "all-linear"),
    ),
    Unused(
        keys="reward_model.sandbox_fusion.*",
        why="a reward asks services itself: pass the address in reward.reward_kwargs",
        trains=True,
        harmless=(None, False, "", 64, 1024),
    ),
    Unused(
        keys="reward_model.reward_kwargs.*",
        why="no counterpart; pass what the function reads in reward.reward_kwargs",
        trains=True,
    ),
)
