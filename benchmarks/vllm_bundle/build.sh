#!/usr/bin/env bash
# Packs vLLM 0.32.0 for a Hopper machine without network that has Python 3.12 and torch 2.11.0 of CUDA 13: OUT/vllm.tar.xz (51 MB) and
# OUT/needs.tar.xz (41 MB). Its wheel asks for torch 2.13.0, but the libraries that a dense model needs are built on torch's stable ABI and
# find all their symbols in 2.11.0.
#   usage: build.sh [OUT]           from the root of the checkout; needs uv, xz and binutils; four minutes of CPU
# There:
#   python3 -m venv --system-site-packages --without-pip vllm
#   python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' > vllm/lib/python3.12/site-packages/torch.pth
#   tar -C vllm/lib/python3.12/site-packages -xf vllm.tar.xz; the same with needs.tar.xz
#   export VLLM_USE_FLASHINFER_SAMPLER=0          FlashInfer is left out
# and engine.python is vllm/bin/python.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-.vllm-bundle}" && cd "${1:-.vllm-bundle}" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
fetch() { uv pip install -q --link-mode copy --no-deps --only-binary :all: --python-version 3.12 --python-platform x86_64-manylinux_2_34 --target "$@"; }
# What the machine has with torch, or nothing imports.
there='torch|triton|intel-|numpy|numba|llvmlite|opencv-|grpcio|networkx|sympy|mpmath|hf-xet|ninja|setuptools|sentry-sdk|fastapi-c|rich-toolkit|rignore|pillow'
grep -vE "^(#|$there)" plugins/slime-vllm/vllm-cpu.txt | sed 's/^apache-tvm-ffi==.*/apache-tvm-ffi==0.1.11/' > "$work/needs.txt"
fetch "$work/vllm" vllm==0.32.0
fetch "$work/needs" -r "$work/needs.txt"

cd "$work"
# FlashAttention 3 stays; 2 is for other GPUs. _qutlass and deep_gemm want a newer torch.
rm -rf vllm/vllm/{vllm-rs,vllm_flash_attn/_vllm_fa2_C*,third_party/fmha_sm100,third_party/deep_gemm,_qutlass*,_deepselect*,_flashkda*}
rm -rf needs/{bin,pycountry/locales} needs/mistral_common/data/*
find . -name '__pycache__' -prune -exec rm -rf {} +
find . -name '*.so*' -size +100k -exec strip -s {} + 2>/dev/null || true
python3 "$here/hopper_only.py" vllm/vllm/{_C_stable_libtorch,_moe_C_stable_libtorch,_flashmla_C}.abi3.so
for part in vllm needs; do tar -C "$part" -c . | xz -T0 -2 > "$out/$part.tar.xz"; done
ls -l "$out"
