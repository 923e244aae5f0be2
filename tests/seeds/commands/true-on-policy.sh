#!/bin/bash
# The trainer computes the log-probs that the engine reports, to the bit.
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 python

set -ex
export PYTHONUNBUFFERED=1
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

CKPT_ARGS=(
   --hf-checkpoint model
)

ROLLOUT_ARGS=(
   --prompt-data train.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 2
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --rollout-max-response-len 16
   --rollout-temperature 1
   --global-batch-size 16
)

EVAL_ARGS=(
   --eval-interval 2
   --eval-prompt-data gsm8k test.jsonl
   --n-samples-per-eval-prompt 1
   --eval-max-response-len 16
   --eval-top-k 1
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --kl-coef 0.00
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-decode-log-interval 1000
   --sglang-enable-metrics
   --sglang-mem-fraction-static 0.4
)

FSDP_ARGS=(--update-weight-buffer-size 536870912)

CI_ARGS=(--ci-test --ci-disable-kl-checker)

TRUE_ON_POLICY_ARGS=(
   --sglang-enable-deterministic-inference
   --sglang-rl-on-policy-target fsdp
   --sglang-attention-backend fa3
   --attn-implementation flash_attention_3
   --deterministic-mode
   --true-on-policy-mode
)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{\"env_vars\": {\"PYTHONPATH\": \"${SCRIPT_DIR}\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   --colocate \
   --train-backend fsdp \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${SGLANG_ARGS[@]} ${EVAL_ARGS[@]} ${FSDP_ARGS[@]} ${CI_ARGS[@]} ${TRUE_ON_POLICY_ARGS[@]}
