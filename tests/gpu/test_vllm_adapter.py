"""A LoRA adapter into a vLLM server on a GPU: what it responds afterwards is what transformers and peft compute.

`pytest tests/gpu/test_vllm_adapter.py -m gpu`: needs peft, and vLLM in `.venv-vllm` or in this interpreter."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_models.new_model import ModelSizes, new_model
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, log_probs_of
from slime_transports.plugin import Adapter
from slime_vllm.plugin import Vllm

pytestmark = pytest.mark.gpu

OWN = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PROMPT = [5, 6, 7, 8, 9, 10] * 20
CLOSE = 0.2
"""Nats, the mean over a response, of bfloat16 and float64: see test_vllm_weights.py."""
SIZES = ModelSizes(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=512, max_length=2048)


class AdapterRank(OneRank):
    """Of a trainer with peft's model."""

    def export(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor]]:
        model: Any = self.model
        for name, tensor in get_peft_model_state_dict(model).items():
            yield {name: tensor.detach().float()}


def changed(trained: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trained


async def apart(engine: Any, model: Any, version: int) -> float:
    sampling = SamplingParams(max_new_tokens=32, temperature=1.0)
    tokens = np.array(PROMPT, np.int32)
    request = GenerateRequest(request_id=f"v{version}", token_ids=tokens, sampling=sampling, seed=version)
    (got,) = await engine.generate([request])
    assert {span.version for span in got.spans} == {version}
    with torch.no_grad():
        expected, _ = log_probs_of(model.double(), PROMPT, got.token_ids.tolist(), 1.0)
    model.float()
    return float(np.abs(expected.numpy() - got.log_probs).mean())


async def test_a_server_responds_with_the_new_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    new_model(folder, "qwen3", SIZES, alphabet="0123456789+= abcdefghij", seed=3, initializer_range=0.1)
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"])
    trained: Any = changed(get_peft_model(load_plain(folder, torch.float32), config).eval(), 0)
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    python = str(OWN) if OWN.exists() else sys.executable
    engine = Vllm.build(Vllm.Config(python=python, gpu_memory_utilization=0.3))
    setup = EngineSetup(
        index=0,
        model_path=folder,
        device="cuda",
        seed=0,
        max_context_len=1024,
        max_batch=16,
        run_dir=tmp_path,
        transport="adapter",
        adapter_rank=8,
    )
    rank = AdapterRank(Adapter, tmp_path, trained, device="cuda", adapter_config=content)
    await engine.start(setup)
    try:
        for version in (1, 2, 3):
            old = load_plain(folder, torch.float32) if version == 1 else None
            changed(trained, version)
            await engine.pause()
            report = await rank.push(engine, version)
            await engine.resume()
            print(f"{report.bytes_sent} bytes in {report.seconds:.3f} s")
            assert await apart(engine, trained, version) < CLOSE
            assert old is None or await apart(engine, old, version) > CLOSE
    finally:
        await engine.stop()
        await asyncio.to_thread(rank.sender.close)
