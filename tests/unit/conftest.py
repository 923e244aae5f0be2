"""Batches and run files to try the kernel's rooms on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from slime_core.types.batch import Batch
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status


def build_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    rollout_id: Sequence[int] | None = None,
    group: Sequence[int] | None = None,
    reward: Sequence[float] | None = None,
    masks: Sequence[Sequence[int]] | None = None,
    versions: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Batch:
    """Samples of these (prompt, response) lengths, with random tokens and log-probs; all trained unless `masks` is set."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    prompt, response = (np.array([pair[side] for pair in lengths], np.int32) for side in (0, 1))
    total, trained = int(prompt.sum() + response.sum()), int(response.sum())
    flat = [] if masks is None else [bit for mask in masks for bit in mask]
    return Batch(
        index=np.arange(count),
        group_index=np.zeros(count, np.int64) if group is None else np.array(group),
        rollout_id=np.arange(count) if rollout_id is None else np.array(rollout_id),
        credit_key=np.zeros(count, np.int64) if group is None else np.array(group),
        reward=rng.normal(size=count) if reward is None else np.array(reward, np.float64),
        truncated=np.zeros(count, np.bool_),
        prompt_length=prompt,
        response_length=response,
        tokens=rng.integers(3, 90, total).astype(np.int32),
        mask=np.ones(trained, np.uint8) if masks is None else np.array(flat, np.uint8),
        rollout_log_probs=rng.normal(-1, 0.5, trained).astype(np.float32),
        version=np.zeros(trained, np.int32)
        if versions is None
        else np.array([v for sample in versions for v in sample], np.int32),
    )


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch


FAKE_PLUGINS = """
from pydantic import Field

from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import EngineDriver
from slime_core.contracts.paths import RunPath
from slime_core.contracts.transport import TransportDriver
from slime_core.plugin import driver, reward


class FakeBackendConfig(DriverConfig):
    tensor_model_parallel_size: int = Field(1, gt=0)
    \"\"\"Ranks that share each layer.\"\"\"
    recompute: bool = False
    \"\"\"Compute activations again.\"\"\"
    warm_start: RunPath | None = None
    \"\"\"A file.\"\"\"


@driver("slime.backends", "fake")
class FakeBackend(BackendDriver):
    Config = FakeBackendConfig

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")

    @classmethod
    def min_world_size(cls, config):
        return config.tensor_model_parallel_size

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout()

    @classmethod
    def problems(cls, config, world_size, model_config):
        return [] if model_config["vocab_size"] == 32 else ["backend: only for a vocabulary of 32."]


class FakeEngineConfig(DriverConfig):
    mem_fraction_static: float = Field(0.8, gt=0, le=1)
    \"\"\"Share of the memory.\"\"\"


@driver("slime.engines", "fake")
class FakeEngine(EngineDriver):
    Config = FakeEngineConfig
    transports = ("carrier",)

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")


class CarrierConfig(DriverConfig):
    bucket_bytes: int = 512
    \"\"\"Bytes.\"\"\"


@driver("slime.transports", "carrier")
class Carrier(TransportDriver):
    Config = CarrierConfig

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")


@reward("one")
def one(sample):
    return 1.0


@reward("two")
def two(sample):
    return 2.0
"""

MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
}

RUN = """
name = "tiny"
model = { hf_checkpoint = "base" }
plugin = ["fakes.py"]
data = { prompt_data = ["train.jsonl"], input_key = "prompt", label_key = "label" }
backend = "fake"
engine = "fake"
reward = "one"
algo = "grpo"
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 16 }
train = { num_rollout = 3, global_batch_size = 32 }
"""


@pytest.fixture
def bound(tmp_path: Path) -> Callable[..., Any]:
    """Binds a run file (RUN, or `text`) with `extra` lines after it and flags, as `slime run` does."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "fakes.py").write_text(FAKE_PLUGINS)

    def bind(*flags: str, text: str = RUN, extra: str = "") -> Any:
        from slime_core.cli.invocation import bind_invocation, parse_words

        (tmp_path / "run.toml").write_text(dedent(text) + dedent(extra))
        words = parse_words([str(tmp_path / "run.toml"), *flags], switches=(), options=(), command="run")
        return bind_invocation(words)

    return bind


def build_group(
    rewards: Sequence[float | None],
    *,
    group_index: int = 0,
    parts: Sequence[dict[str, float]] | None = None,
    length: int = 2,
) -> SampleGroup:
    """One prompt with a response of `length` tokens for every reward; None: the response failed."""
    prompt = Prompt(group_index=group_index, text="q", token_ids=np.array([1, 2], np.int32), origin="train.jsonl:1")
    samples = tuple(
        Sample(
            index=group_index * len(rewards) + n,
            group_index=group_index,
            rollout_id=group_index * len(rewards) + n,
            prompt=prompt,
            tokens=np.array([1, 2, *range(3, 3 + length)], np.int32),
            prompt_length=2,
            loss_mask=np.ones(length, np.uint8),
            rollout_log_probs=np.zeros(length, np.float32),
            reward=reward,
            reward_parts={} if parts is None else parts[n],
            status=Status.FAILED if reward is None else Status.COMPLETED,
        )
        for n, reward in enumerate(rewards)
    )
    return SampleGroup(prompt=prompt, samples=samples)


@pytest.fixture
def make_group() -> Callable[..., SampleGroup]:
    return build_group
