"""True on-policy on one GPU: the engine's log-prob of a token that it decoded equals the trainer's, bit for bit.

A Qwen3 of 45 million parameters with random weights, and a small run."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import Completion, GenerateRequest, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_local.config import LocalConfig
from slime_local.plugin import Local
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import TEMPERATURE, Place

pytestmark = pytest.mark.gpu

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
VOCAB = 32_000
RESPONSES = 48
RUN = """\
name = "NAME"
backend = { name = "fsdp", precision = "bfloat16" }
engine = { name = "local", dtype = "bfloat16" }
reward = "gsm8k"
algo = { name = "grpo", true_on_policy_mode = ON, get_mismatch_metrics = true }
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 16, n_samples_per_prompt = 4, rollout_max_response_len = 64 }
train = { num_rollout = 3, num_steps_per_rollout = 2, lr = 1e-3 }
launcher = { device = "cuda" }
checkpoint = { save_hf = false }
"""


def larger_model(folder: Path, *, hidden: int = 512, vocab: int = VOCAB) -> Path:
    """Has the tiny model's tokenizer and a larger vocabulary."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=hidden // 8, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.08, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    for file in make_tiny_model(folder / "tiny").glob("token*"):
        shutil.copy(file, folder / "model")
    return folder / "model"


def requests(vocab: int = VOCAB, longest: int = 300) -> list[GenerateRequest]:
    """Prompts and responses from one token on; four responses to each prompt."""
    rng = np.random.default_rng(4)
    made = []
    for number in range(RESPONSES):
        if number % 4 == 0:
            prompt = rng.integers(2, vocab, rng.integers(1, longest)).astype(np.int32)
        budget = int(rng.integers(1, longest))
        sampling = SamplingParams(max_new_tokens=budget, min_new_tokens=budget, temperature=TEMPERATURE)
        made.append(GenerateRequest(request_id=f"r{number}", token_ids=prompt, sampling=sampling, seed=number))
    return made


def generate(
    model: Path, asked: Sequence[GenerateRequest], dtype: str, *, device: str, on: bool, max_running: int
) -> list[Completion]:
    async def scene() -> list[Completion]:
        engine = Local.build(LocalConfig.model_validate({"dtype": dtype, "max_running": max_running}))
        setup = EngineSetup(
            index=0, model_path=model, device=device, seed=0, max_context_len=1024, max_batch=64, run_dir=model,
            true_on_policy=on,
        )  # fmt: skip
        await engine.start(setup)
        responses = list(await engine.generate(asked))
        await engine.stop()
        return responses

    return asyncio.run(scene())


def group_of(number: int, request: GenerateRequest, response: Completion) -> SampleGroup:
    prompt = Prompt(group_index=number, text="", token_ids=request.token_ids)
    sample = Sample(
        index=number,
        group_index=number,
        rollout_id=number,
        prompt=prompt,
        tokens=np.concatenate([request.token_ids, response.token_ids]),
        prompt_length=len(request.token_ids),
        loss_mask=np.ones(len(response.token_ids), np.uint8),
        rollout_log_probs=response.log_probs,
        reward=1.0,
    )
    return SampleGroup(prompt=prompt, samples=(sample,))


def gaps(
    model: Path, asked: Sequence[GenerateRequest], responses: Sequence[Completion], dtype: str, *, device: str, on: bool
) -> list[npt.NDArray[np.float64]]:
    """|trainer - engine| of every token in nats, for two ways to pack the responses."""
    batch = build_batch([group_of(number, *pair) for number, pair in enumerate(zip(asked, responses, strict=True))])
    backend = Fsdp.build(FsdpConfig.model_validate({"precision": dtype}))
    backend.setup(Place(model=model).setup(device=device, true_on_policy=on))
    found = []
    for size in (len(asked), 7):
        order = np.arange(len(asked))[::-1] if size == 7 else np.arange(len(asked))
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        micros = [pack_micro_batch(batch, group, temperature=TEMPERATURE) for group in groups]
        column = np.full(len(batch.mask), np.nan)
        for group, scores in zip(groups, backend.forward_only(micros), strict=True):
            assert scores.log_probs is not None
            column[batch.response_rows(group)] = scores.log_probs
        found.append(np.abs(column - batch.rollout_log_probs))
    backend.close()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_difference_is_exactly_zero(tmp_path: Path, dtype: str) -> None:
    model, asked = larger_model(tmp_path), requests()
    responses = generate(model, asked, dtype, device="cuda", on=True, max_running=RESPONSES)
    fewer = generate(model, asked, dtype, device="cuda", on=True, max_running=5)
    for one, other in zip(responses, fewer, strict=True):
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
    for gap in gaps(model, asked, responses, dtype, device="cuda", on=True):
        assert gap.max() == 0.0, f"{(gap > 0).sum()} of {len(gap)} tokens differ, by up to {gap.max()} nats"


def test_without_it_they_differ(tmp_path: Path) -> None:
    """So the test above can fail."""
    model, asked = larger_model(tmp_path), requests()
    responses = generate(model, asked, "bfloat16", device="cuda", on=False, max_running=RESPONSES)
    assert gaps(model, asked, responses, "bfloat16", device="cuda", on=False)[0].max() > 1e-4


def test_a_run_has_no_gap_in_any_step(tmp_path: Path) -> None:
    sizes = ["--hidden-size", "256", "--num-layers", "3", "--intermediate-size", "512", "--max-length", "128"]
    slime(tmp_path, "models", "new", "base", "--alphabet", "0123456789+= ", *sizes)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gap = {}
    for name, on in (("on", "true"), ("off", "false")):
        (tmp_path / "run.toml").write_text(RUN.replace("NAME", name).replace("ON", on))
        slime(tmp_path, "run", "run.toml")
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [one["metrics"] for one in map(json.loads, lines) if one["axis"] == "train/step"]
        gap[name] = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
        assert len(steps) == 6
    assert gap["on"] == [0.0] * 6
    assert min(gap["off"]) > 0


def slime(folder: Path, *words: str) -> None:
    ended = subprocess.run([*SLIME, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
