#!/usr/bin/env bash
# Packs the Tinker SDK and what it and `slime serve` import, for a GPU machine without network that has Python 3.12: OUT/tinker.tar.xz.
#   usage: tinker_bundle.sh [OUT]           from the root of the checkout; needs uv and xz; half a minute
# There, as a folder that comes after the machine's own packages, which win where it has them:
#   mkdir -p /tmp/tinker && tar -C /tmp/tinker -xf tinker.tar.xz
#   echo /tmp/tinker > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/tinker.pth"
# torch, transformers and numpy must be there. Versions are those of plugins/slime-tinker/tinker-client.txt.
set -euo pipefail
out=$(mkdir -p "${1:-.tinker-bundle}" && cd "${1:-.tinker-bundle}" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
names='annotated-doc|annotated-types|anyio|certifi|click|distro|h11|h2|hpack|httpcore|httpx|hyperframe|idna|markdown-it-py|mdurl|opentelemetry-api|orjson|protobuf|pydantic|pydantic-core|pygments|pyqwest|rich|shellingham|sniffio|tinker|typer|typing-extensions|typing-inspection|zstandard'
grep -E "^($names)==" plugins/slime-tinker/tinker-client.txt > "$work/needs.txt"
grep -hE '^(pluggy|psutil|starlette|tomlkit|uvicorn)==' constraints.txt >> "$work/needs.txt" || true
uv pip install -q --link-mode copy --no-deps --only-binary :all: --python-version 3.12 --python-platform x86_64-manylinux_2_34 --target "$work/tinker" -r "$work/needs.txt"
rm -rf "$work/tinker/bin"
find "$work" -name '__pycache__' -prune -exec rm -rf {} +
tar -C "$work/tinker" -c . | xz -T0 -6 > "$out/tinker.tar.xz"
cat "$work/needs.txt"
ls -l "$out"
