MODEL_ARGS=(--swiglu --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --rotary-base "${ROTARY_BASE:-10000}")
