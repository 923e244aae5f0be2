"""Runs whose engines start from another folder than the trainer: weights in float8 by block, and folders that do not fit.

The engine here is the local one, which dequantizes float8 weights and computes with the rounded values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_plugin_kit.converted_folder import converted_folder

if TYPE_CHECKING:
    from torch import Tensor

    from conftest import TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

ENGINE = '''
import json
import shutil
from dataclasses import replace

import numpy as np

from slime_core.plugin import driver
from slime_local.plugin import Local

BLOCK = 16


def whole(tensors):
    """float32 in place of float8 and its scales."""
    import torch

    made = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_scale_inv"):
            continue
        scale = tensors.get(name.replace("weight", "weight_scale_inv"))
        if scale is not None:
            assert tensor.dtype == torch.float8_e4m3fn
            spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            tensor = tensor.float() * spread[: tensor.shape[0], : tensor.shape[1]]
        made[name] = tensor
    return made


def tensors_of(bucket):
    import torch

    found, start = {}, 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes):
        dtype = getattr(torch, dtype)
        end = start + dtype.itemsize * int(np.prod(shape))
        found[name] = torch.from_numpy(bucket.data[start:end].copy()).view(dtype).reshape(shape)
        start = end
    return found


@driver("slime.engines", "rounded")
class Rounded(Local):
    supports_quantized_weights = True

    @classmethod
    def build(cls, config):
        from safetensors.torch import load_file, save_file

        from slime_core.workers.buckets import make_bucket
        from slime_local.engine import LocalEngine

        class Engine(LocalEngine):
            async def start(self, setup):
                self.folder, plain = setup.run_dir, setup.run_dir / "plain"
                shutil.copytree(setup.model_path, plain)
                (file,) = plain.glob("*.safetensors")
                save_file(whole(load_file(file)), file, {"format": "pt"})
                config = json.loads((plain / "config.json").read_text())
                assert config.pop("quantization_config")["weight_block_size"] == [BLOCK, BLOCK]
                (plain / "config.json").write_text(json.dumps(config))
                return await super().start(replace(setup, model_path=plain))

            async def load_bucket(self, bucket):
                sent = tensors_of(bucket)
                save_file(sent, self.folder / f"sent_{bucket.version}.safetensors", {"format": "pt"})
                again = make_bucket(
                    list(whole(sent).items()), version=bucket.version, index=bucket.index, last=bucket.last
                )
                await super().load_bucket(again)

        return Engine(config)
'''
MISMATCH = "train/train_rollout_logprob_abs_diff"


def convert(source: Path, target: Path) -> Mapping[str, Tensor]:
    (file,) = converted_folder(source, target, "fp8", block_size=16).glob("*.safetensors")
    return load_file(file)


def test_trained_weights_are_quantized_in_a_weight_update(tiny: TinyRun) -> None:
    (tiny / "rounded.py").write_text(ENGINE)
    of_start = convert(tiny / "base", tiny / "base-fp8")
    words = [
        "--plugin",
        "rounded.py",
        "--engine",
        "rounded",
        "--get-mismatch-metrics",
        "--save-hf",
        "--num-rollout",
        "2",
    ]
    ended = tiny.run(*words, "--rollout-load", "base-fp8")
    assert ended.code == 0, ended.err
    far = [record["metrics"][MISMATCH] for record in tiny.metrics() if record["axis"] == "train/step"]
    # The weights are rounded, but those of the step.
    assert all(1e-5 < value < 0.05 for value in far), far
    last = max(tiny.runs.glob("tiny/sent_*.safetensors"), key=lambda path: int(path.stem.removeprefix("sent_")))
    sent = load_file(last)
    of_end = convert(tiny / "runs/tiny/hf", tiny / "final-fp8")
    assert sent.keys() == of_end.keys()
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in sent.values()) == 7
    assert all(torch.equal(bits(sent[name]), bits(of_end[name])) for name in sent)
    assert not all(torch.equal(bits(sent[name]), bits(of_start[name])) for name in sent)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def other_tensors(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def quantized(folder: Path, how: Mapping[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(how)}))


CASES = {
    "an engine that takes no quantized weights": (
        lambda folder: quantized(folder, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
        2,
        [
            'model.rollout_load = {folder}/other: its weights are quantized, and engine "local" takes no such',
            "Leave model.roll",
        ],
    ),
    "an unknown format": (
        lambda folder: quantized(folder, {"quant_method": "awq"}),
        2,
        [
            "its weights are quantized (awq), and no installed converter (fp8, ",
            "`slime convert {folder}/base FOLDER --to NAME`",
        ],
    ),
    "more tensors": (other_tensors, 3, ["1 tensors that {folder}/base has not", "model.layers.1.mlp.up_proj.weight"]),
    "other shapes": (
        other_shapes,
        3,
        ["another model: model.layers.0.mlp.up_proj.weight has shape [48, 32]", "[64, 32]"],
    ),
    "no folder": (shutil.rmtree, 3, ["model.rollout_load = {folder}/other: no such folder"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_does_not_fit(case: str, tiny: TinyRun) -> None:
    change, code, states = CASES[case]
    shutil.copytree(tiny / "base", tiny / "other")
    change(tiny / "other")
    (tiny / "rounded.py").write_text(ENGINE)
    engine = ["--plugin", "rounded.py", "--engine", "rounded"] if "unknown format" in case else []
    ended = tiny.run("--dry-run", *engine, "--rollout-load", "other")
    assert ended.code == code, ended.err
    missing = [text for text in states if text.replace("{folder}", str(tiny.folder)) not in ended.error]
    assert not missing, ended.error


def test_a_trained_folder_that_is_quantized(tiny: TinyRun) -> None:
    quantized(tiny / "base", {"quant_method": "fp8", "weight_block_size": [16, 16]})
    ended = tiny.run("--dry-run")
    assert ended.code == 2
    assert f"model.hf_checkpoint = {tiny.folder}/base: its weights are quantized" in ended.error
    assert ended.error.endswith("trainer. Name a folder whose weights are not quantized.\n")


def test_plain_weights_of_another_folder(tiny: TinyRun) -> None:
    """Engines start from it and get the trained weights before anything is generated."""
    shutil.copytree(tiny / "base", tiny / "other")
    weights = load_file(tiny / "base/model.safetensors")
    save_file(
        {name: 3 * weight for name, weight in weights.items()}, tiny / "other/model.safetensors", {"format": "pt"}
    )
    ended = tiny.run("--get-mismatch-metrics", "--num-rollout", "1", "--rollout-load", "other")
    assert ended.code == 0, ended.err
    far = [record["metrics"][MISMATCH] for record in tiny.metrics() if record["axis"] == "train/step"]
    assert all(value < 1e-5 for value in far), far
