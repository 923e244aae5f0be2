#!/usr/bin/env bash
# Packs verl 0.9.1 for a GPU machine without network that has Python 3.12, torch 2.11.0, Ray, SGLang, transformers, datasets,
# pyarrow, pandas, accelerate and tensorboard: OUT/verl.tar.xz (2 MB).
#   usage: build.sh [OUT]           from the root of the checkout; needs uv and xz; seconds
# There:
#   mkdir verl-packages && tar -C verl-packages -xf verl.tar.xz
# and peer_gpu.py gets --peer-path verl-packages. antlr4 is the release that Hydra reads its grammar with; other programs may
# need another one, so the folder is on the path of verl alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-.verl-bundle}" && cd "${1:-.verl-bundle}" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
fetch() { uv pip install -q --link-mode copy --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_34 --target "$work/packages" "$@"; }
fetch --only-binary :all: -r "$here/requirements.txt"
# Of 4.9 there is no wheel; it is Python alone.
fetch antlr4-python3-runtime==4.9.3
cd "$work/packages"
rm -rf bin .lock pydevd_plugins recipe scripts tests tutorial
find . -name '__pycache__' -prune -exec rm -rf {} +
tar -c . | xz -T0 -6 > "$out/verl.tar.xz"
ls -l "$out"
