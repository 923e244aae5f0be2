# A launch script of verl as people have them, in small.
set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=train.parquet \
    data.val_files="['test.parquet']" \
    data.train_batch_size=4 \
    data.max_prompt_length=16 \
    data.max_response_length=4 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=base \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    custom_reward_function.path=score.py \
    +custom_reward_function.reward_kwargs.bonus=0.5 \
    trainer.logger='["console"]' \
    trainer.project_name=sums trainer.experiment_name=tiny_sums \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=1 \
    trainer.total_training_steps=2 "$@"
