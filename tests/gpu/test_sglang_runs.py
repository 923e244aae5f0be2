"""`slime run` with SGLang on one GPU, where trainer and engine take turns: runs that a CPU cannot do, or that free no memory
there; and weight updates of draft models. SGLang's kernels are compiled at first use, which takes a minute."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core import groups
from slime_core.contracts.setup import EngineSetup
from slime_core.registry import Registry, bind
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_core.workers.buckets import buckets_of

pytestmark = pytest.mark.gpu

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
STEPS = 4
SERVER: Mapping[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "disable_cuda_graph": True,
}
OWN_LAYER: Mapping[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
LAYERS = 2
"""Layers of GLM's model; the one behind them drafts."""
RUN = """\
name = "tiny"
backend = { BACKEND }
engine = { ENGINE }
reward = "gsm8k"
algo = { name = "grpo", get_mismatch_metrics = true }
launcher = { name = "local", device = "cuda", colocate = true }
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 8, n_samples_per_prompt = 4, rollout_max_response_len = 128 }
train = { num_rollout = 4, num_steps_per_rollout = 1, lr = 1e-3 }
sync = { transport = "ipc" }
"""
VANDAL = '''
"""Kills the server while it responds in step 2."""
import os, signal, threading
import psutil
from slime_core.plugin import hook


@hook
def rollout_start(event):
    if event.rollout_id != 2:
        return
    children = psutil.Process().children(recursive=True)
    (server,) = [child.pid for child in children if child.cmdline()[1:3] == ["-m", "slime_sglang.server.launch"]]
    (event.run.run_dir / "killed").write_text(str(server))
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
'''


def run(folder: Path, engine: Mapping[str, Any], *words: str, backend: str = 'name = "fsdp"') -> Path:
    """`backend`: what is in its table. The folder has the model in `base`."""
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {"name": "sglang", **engine}.items())
    (folder / "run.toml").write_text(RUN.replace("ENGINE", table).replace("BACKEND", backend))
    slime(folder, "run", "run.toml", "--dump-rollouts", *words)
    return folder / "runs" / "tiny"


def new_model(folder: Path, name: str, width: int, *words: str) -> None:
    sizes = {"--hidden-size": width, "--num-heads": width // 64, "--intermediate-size": 2 * width}
    size_words = [str(part) for pair in sizes.items() for part in pair]
    slime(folder, "models", "new", name, "--alphabet", "0123456789+= ", *size_words, *words)


def slime(folder: Path, *words: str) -> None:
    ended = subprocess.run([*SLIME, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path, axis: str) -> list[dict[str, float]]:
    return [row["metrics"] for row in lines(folder / "metrics.jsonl") if row["axis"] == axis]


def assert_engine_has_the_trainers_weights(folder: Path) -> None:
    for step in metrics(folder, "train/step"):
        assert step["train/train_rollout_logprob_abs_diff"] < 0.03


def assert_it_speculated(folder: Path) -> None:
    for step in metrics(folder, "rollout/step"):
        assert step["rollout/spec_accept_length"] >= 1
        assert 0 <= step["rollout/spec_accept_rate"] <= 1


def test_engines_in_float8_are_updated_by_a_trainer_in_bfloat16(tmp_path: Path) -> None:
    """The engines' log-probs are those of each step's rounded weights: their distance from the trainer's does not grow."""
    new_model(tmp_path, "base", 256, "--num-layers", "4")
    slime(tmp_path, "convert", "base", "base-fp8", "--to", "fp8")
    folder = run(tmp_path, SERVER, "--rollout-load", "base-fp8")
    far = [step["train/train_rollout_logprob_abs_diff"] for step in metrics(folder, "train/step")]
    print(f"nats between trainer and engines: {far}")
    assert all(0.0 < value < 0.1 for value in far)


def test_drafts_of_another_model_keep_its_weights(tmp_path: Path) -> None:
    new_model(tmp_path, "base", 256, "--num-layers", "4")
    new_model(tmp_path, "other", 128, "--num-layers", "1", "--seed", "7")
    draft = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(tmp_path / "other"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    folder = run(tmp_path, {**SERVER, **draft})
    assert_engine_has_the_trainers_weights(folder)
    assert_it_speculated(folder)


def test_a_model_drafts_with_its_own_layer_which_is_trained_too(tmp_path: Path) -> None:
    """GLM-4.5 with a layer of multi-token prediction, by slime-megatron."""
    new_model(tmp_path, "base", 256)
    make_glm(tmp_path / "base")
    folder = run(tmp_path, {**SERVER, **OWN_LAYER}, backend='name = "megatron", mtp_num_layers = 1')
    assert_engine_has_the_trainers_weights(folder)
    assert_it_speculated(folder)
    assert all(step["train/mtp_1_loss"] > 0 for step in metrics(folder, "train/step"))
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "base", folder / "hf"))
    joined = f"model.layers.{LAYERS}.eh_proj.weight"
    assert not torch.equal(before[joined], after[joined])


def test_a_weight_update_reaches_the_layer_that_drafts(tmp_path: Path) -> None:
    """In a model whose next token depends only on the last one, the token after it can be predicted; but the server starts with
    a layer that predicts the least likely one."""
    new_model(tmp_path, "base", 256)
    make_glm(tmp_path / "base")
    right = make_bigram(tmp_path / "base")
    before, after = asyncio.run(accepted(tmp_path / "base", right, tmp_path))
    print(f"drafts accepted: {before:.3f}, after the weight update {after:.3f}")
    assert before < 0.1
    assert after > 0.9


def make_bigram(folder: Path) -> dict[str, Tensor]:
    """Returns weights that draft correctly; those in `folder` have the layer's input negated."""
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight.normal_(std=0.3)
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights["lm_head.weight"][ends] = 0.0
    joined = weights[f"model.layers.{LAYERS}.eh_proj.weight"].zero_()
    width = joined.shape[0]
    joined[:, :width] = -torch.eye(width)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights | {f"model.layers.{LAYERS}.eh_proj.weight": -joined}


async def accepted(folder: Path, new: Mapping[str, Tensor], run_dir: Path) -> list[float]:
    """The share of drafts that were, of greedy responses of a server of the folder; and once it has been sent `new`."""
    resolved = Registry().resolve(groups.ENGINES, "sglang", where="test")
    engine = resolved.driver.build(bind(resolved, {**SERVER, **OWN_LAYER}, where="engine"))
    setup = EngineSetup(
        index=0, model_path=folder, device="cuda", seed=0, max_context_len=512, max_batch=16, run_dir=run_dir
    )
    await engine.start(setup)
    try:
        rates = [await accept_rate(engine)]
        await engine.pause()
        for bucket in buckets_of([dict(new)], version=1, bucket_bytes=2**28):
            await engine.load_bucket(bucket)
        await engine.resume()
        return [*rates, await accept_rate(engine)]
    finally:
        await engine.stop()


async def accept_rate(engine: Any) -> float:
    sampling = SamplingParams(max_new_tokens=64, temperature=0.0)
    responses = await engine.generate(
        [
            GenerateRequest(
                request_id=f"{token}", token_ids=np.array([token], dtype=np.int32), sampling=sampling, seed=token
            )
            for token in range(3, 11)
        ]
    )
    assert [len(response.token_ids) for response in responses] == [64] * 8
    return float(np.mean([response.extra["spec_accept_rate"] for response in responses]))


def make_glm(folder: Path) -> None:
    """Puts GLM-4.5's model, in its released form, beside the tokenizer in `folder`: the layer behind its last one predicts the
    token after the next."""
    known = json.loads((folder / "config.json").read_text())
    config = AutoConfig.for_model(
        "glm4_moe", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1,
        n_group=1, topk_group=1, num_hidden_layers=LAYERS + 1, dtype="float32",
        **{key: known[key] for key in ("vocab_size", "pad_token_id", "eos_token_id", "max_position_embeddings")},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    own = f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{own}{name}.weight"] = torch.ones(config.hidden_size)
    weights[f"{own}eh_proj.weight"] = 0.02 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def test_an_engine_that_shares_the_trainers_gpu_is_killed_and_replaced(tmp_path: Path) -> None:
    new_model(tmp_path, "base", 256, "--num-layers", "4")
    (tmp_path / "vandal.py").write_text(VANDAL)
    folder = run(tmp_path, SERVER, "--plugin", "vandal.py")
    assert_engine_has_the_trainers_weights(folder)
    events = lines(folder / "events.jsonl")
    lost, restarted, recovered = (
        next(event for event in events if event["event"] == f"engine_{what}")
        for what in ("lost", "restarted", "recovered")
    )
    assert restarted["pid"] != int((folder / "killed").read_text())
    assert lost["engine"] == restarted["engine"] == recovered["engine"]
    assert lost["redispatched"] > 0
    assert len(metrics(folder, "rollout/step")) == STEPS
