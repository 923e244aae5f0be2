"""SGLang on one GPU with quantised weights: folders of `slime convert`, and a server that quantises what a trainer sends.

A Qwen3 of 50 million random parameters. What a server says of given tokens is compared with transformers in float32."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slime_core import groups
from slime_core.contracts.engine import EngineSetup
from slime_core.registry import Registry, bind
from slime_core.workers.buckets import buckets_of

pytestmark = pytest.mark.gpu

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
VOCAB, LENGTH, SEQUENCES = 4096, 200, 8
SERVER = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "disable_cuda_graph": True,
}
FOLDERS: Mapping[str, Sequence[str]] = {
    "block": ("--to", "fp8"),
    "channel": ("--to", "fp8", "--strategy", "channel"),
    "tensor": ("--to", "fp8", "--strategy", "tensor"),
    "int4": ("--to", "int4", "--group-size", "64"),
}
NATS = {"plain": 0.05, "block": 0.15, "channel": 0.15, "tensor": 0.2, "int4": 0.6, "online": 0.15}
"""Mean distance from transformers in float32; uniform guesses are more than 2 nats away. Four bits are coarse."""


class Models(NamedTuple):
    model: Path
    other: Path
    of_model: npt.NDArray[np.float32]
    of_other: npt.NDArray[np.float32]


def write_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.05,
        bos_token_id=0, eos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def sequences() -> list[npt.NDArray[np.int32]]:
    return list(np.random.default_rng(0).integers(0, VOCAB, (SEQUENCES, LENGTH)).astype(np.int32))


@torch.no_grad()
def expected(folder: Path) -> npt.NDArray[np.float32]:
    """(SEQUENCES, LENGTH - 1)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    tokens = torch.from_numpy(np.stack(sequences())).long().cuda()
    said = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    found: npt.NDArray[np.float32] = said.cpu().numpy()
    return found


async def scores(engine: Any) -> npt.NDArray[np.float32]:
    return np.stack(await engine.score(sequences(), [LENGTH - 1] * SEQUENCES))


async def serve(folder: Path, run_dir: Path, new: Path | None = None, **options: Any) -> list[Any]:
    """What a server of the folder says; and what it says once it has been sent the weights of `new`."""
    resolved = Registry().resolve(groups.ENGINES, "sglang", where="test")
    engine = resolved.driver.build(bind(resolved, SERVER | options, where="engine"))
    setup = EngineSetup(
        index=0, model_path=folder, device="cuda", seed=0, max_context_len=512, max_batch=16, run_dir=run_dir
    )
    await engine.start(setup)
    try:
        said = [await scores(engine)]
        if new is not None:
            named = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16).state_dict()
            await engine.pause()
            for bucket in buckets_of([named], version=1, bucket_bytes=2**28):
                await engine.load_bucket(bucket)
            await engine.resume()
            said.append(await scores(engine))
        return said
    finally:
        await engine.stop()


@pytest.fixture(autouse=True)
def without_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled at first use, for minutes, by headers that an installation may lack."""
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    model, other = write_model(folder / "model", 1), write_model(folder / "other", 2)
    of_model, of_other = expected(model), expected(other)
    assert np.abs(of_model - of_other).mean() > 1, "two models that could not be told apart"
    return Models(model, other, of_model, of_other)


@pytest.mark.parametrize("name", ["plain", *FOLDERS])
def test_a_server_of_quantised_weights_says_what_the_model_says(name: str, models: Models, tmp_path: Path) -> None:
    folder = models.model
    if name in FOLDERS:
        folder = tmp_path / name
        subprocess.run([*SLIME, "convert", str(models.model), str(folder), *FOLDERS[name]], check=True)
    (said,) = asyncio.run(serve(folder, tmp_path))
    away = float(np.abs(said - models.of_model).mean())
    print(f"{name}: {away:.4f} nats from transformers in float32")
    assert away < NATS[name]


def test_a_server_quantises_what_a_trainer_sends(models: Models, tmp_path: Path) -> None:
    before, after = asyncio.run(serve(models.model, tmp_path, models.other, quantization="fp8"))
    away = [float(np.abs(said - of).mean()) for said, of in ((before, models.of_model), (after, models.of_other))]
    print(f"online: {away} nats from transformers in float32")
    assert max(away) < NATS["online"]
