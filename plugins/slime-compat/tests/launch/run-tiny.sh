#!/bin/bash
# A launch script as people have them: what is running is ended, arrays collect the flags, Ray starts the training.

pkill -9 sglang
sleep 3
ray stop --force
pkill -9 python

set -ex
export PYTHONBUFFERED=16

GPUS=$(nvidia-smi -L | wc -l)
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/model.sh"

CKPT_ARGS=(
   --hf-checkpoint ${BASE_DIR:-/root}/base
   --ref-load ${BASE_DIR:-/root}/base_torch_dist
   --load runs/tiny-grpo/
   --save runs/tiny-grpo/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data train.jsonl
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --custom-rm-path old_task.reward
   --custom-generate-function-path old_task.generate
   --dynamic-sampling-filter-path old_task.unequal
   --num-rollout 2
   --rollout-batch-size 2
   --n-samples-per-prompt 2
   --rollout-max-response-len 4
   --rollout-temperature 0.8
   --global-batch-size 4
   --over-sampling-batch-size 4
)
EVAL_ARGS=(
   # --eval-interval 20
   --eval-prompt-data sums train.jsonl@[0:2]
   --n-samples-per-eval-prompt 1
   --eval-top-p 1
)
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --recompute-granularity full
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 512
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
WANDB_ARGS=(
   #--use-wandb
)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7)
MISC_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"${SCRIPT_DIR}/tasks\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]} ${MISC_ARGS[@]}
