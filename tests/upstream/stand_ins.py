"""Stand-ins for the folders and files of a run file: config.json of a public model, a small tokenizer, rows of data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

MODELS: Final[tuple[tuple[str, str], ...]] = (
    (r"qwen3\.5-0\.8b", "qwen3_5"),
    (r"qwen3\.5-(9b|27b)", "qwen3_5"),
    (r"qwen3\.[56]-35b", "qwen3_5_moe"),
    (r"minimax-m2", "minimax_m2"),
    (r"qwen3-next-80b", "qwen3-next-80B-A3B"),
    (r"qwen3-30b", "qwen3-30B-A3B"),
    (r"qwen3-235b", "qwen3-235B-A22B"),
    (r"qwen3-0\.6b", "qwen3-0.6B"),
    (r"qwen3-4b", "qwen3-4B"),
    (r"qwen3-8b", "qwen3-8B"),
    (r"qwen3-32b", "qwen3-32B"),
    (r"qwen2\.5-0\.5b", "qwen2.5-0.5B"),
    (r"qwen2\.5-3b|qwen2\.5-3b", "qwen2.5-3B"),
    (r"r1-distill-qwen-7b", "qwen2.5-7B"),
    (r"glm-z1-9b", "glm4-9B"),
    (r"glm-?4\.7-355b", "glm4.7-355B-A32B"),
    (r"glm-4\.7-flash", "glm4.7-30B-A3B"),
    (r"glm-5", "glm5-744B-A40B"),
    (r"kimi-k2", "kimi-k2"),
    (r"moonlight", "moonlight-16B-A3B"),
    (r"deepseek-r1", "deepseek-v3"),
    (r"mimo-7b", "mimo-7B"),
)
"""Names of model folders to presets of slime-models, or to the model_type of transformers whose own defaults have the shape."""
SMALLER: Final[Mapping[str, Any]] = {
    r"0\.8b": {"num_hidden_layers": 24, "hidden_size": 1024},
    r"9b|27b": {},
}
ALPHABET: Final = "0123456789+-*/= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?\n<>|_"


def model_folder(folder: Path) -> None:
    """Writes config.json, an empty weights file and a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(folder.name.lower())))
    save_file({}, folder / "model.safetensors")
    for name, content in tokenizer().items():
        (folder / name).write_bytes(content)


def config_of(name: str) -> Mapping[str, Any]:
    from transformers import AutoConfig

    from slime_models.model_presets import find_preset

    known = next((model for pattern, model in MODELS if re.search(pattern, name)), None)
    if known is None:
        raise LookupError(f"no stand-in for a model of the name {name}: add it to MODELS")
    if known.startswith(("qwen3_5", "minimax")):
        config: dict[str, Any] = AutoConfig.for_model(known).to_dict()
    else:
        preset = find_preset(known)
        config = AutoConfig.for_model(preset.architecture, **preset.fields).to_dict()
        if name.startswith(("mimo", "glm-4.7", "glm-5", "deepseek")):
            config["num_nextn_predict_layers"] = 1
    if "fp8" in name:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return config


@cache
def tokenizer() -> Mapping[str, bytes]:
    """Its files by name."""
    import tempfile

    from slime_models.new_model import character_tokenizer

    made = character_tokenizer(ALPHABET, ["<|im_start|>", "<|im_end|>"])
    made.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
        "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def data_file(path: Path, data: Mapping[str, Any], eval_: Mapping[str, Any], *, sft: bool) -> None:
    """One row, repeated, with the columns that the run file names."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = [{"role": "assistant", "content": "2"}] if sft else []
    messages = [{"role": "user", "content": "1+1="}, *answer]
    row: dict[str, Any] = {}
    for table, prefix in ((data, ""), (eval_, "eval_")):
        row[table.get(f"{prefix}input_key") or "input"] = messages if data.get("apply_chat_template") or sft else "1+1="
        row[table.get(f"{prefix}label_key") or "label"] = "2"
        row[table.get(f"{prefix}metadata_key") or data.get("metadata_key") or "metadata"] = {"rm_type": "math"}
    rows = [row] * 600
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
