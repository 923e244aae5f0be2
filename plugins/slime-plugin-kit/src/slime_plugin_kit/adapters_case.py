"""Several adapters on an engine (`Capability.ADAPTERS`), beside transformers and peft alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from slime_core.errors import EngineRefused
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.weights import Bucket
from slime_core.workers.buckets import make_bucket
from slime_plugin_kit.tiny_model import load_plain, log_probs_of

ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
CLOSE: Final = 1e-5
"""Nats, of float32 and float64."""
CLOSE_PROMPT: Final = 2e-5
"""Tokens of a prompt may be as unlikely as they like."""
PROMPT: Final = (5, 6, 7, 8, 9, 10, 11)
TEMPERATURE: Final = 0.8


def peft_model(folder: Path, seed: int, *, targets: Sequence[str] = ALL, rank: int = 4) -> Any:
    """With matrices far from zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(load_plain(folder, torch.float32), config).eval().double()


def bucket_of(model: Any) -> Bucket:
    """For `AdapterEngine.load_adapter`, with a scale of 2."""
    found = {
        name.removeprefix("base_model.model.").replace(".default.", "."): tensor.detach().float()
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }
    return make_bucket(list(found.items()), version=0, index=0, last=True)


def requests(adapter: str | None, count: int, label: str, **sampling: Any) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{label}/{adapter}/{number}",
            token_ids=np.array([*PROMPT, 5 + number], np.int32),
            sampling=SamplingParams(**({"max_new_tokens": 16, "temperature": TEMPERATURE} | sampling)),
            seed=number,
            adapter=adapter,
        )
        for number in range(count)
    ]


def apart(model: Any, asked: Sequence[GenerateRequest], responses: Sequence[Completion]) -> float:
    """The largest difference of a log-prob, in nats."""
    found = 0.0
    for request, response in zip(asked, responses, strict=True):
        with torch.no_grad():
            expected, _ = log_probs_of(model, request.token_ids.tolist(), response.token_ids.tolist(), TEMPERATURE)
        found = max(found, float((expected - torch.tensor(response.log_probs, dtype=torch.float64)).abs().max()))
    return found


async def require_two_adapters(engine: Any, folder: Path) -> None:
    """Requests with either adapter and with none, all at once; one adapter is replaced by another, and the other one stays."""
    models: dict[str | None, Any] = {
        None: load_plain(folder),
        "first": peft_model(folder, 1),
        "second": peft_model(folder, 2, targets=("q_proj", "v_proj", "down_proj"), rank=8),
    }
    for name in ("first", "second"):
        await engine.load_adapter(name, 2.0, bucket_of(models[name]))
    await require_close(engine, models, "two")
    await require_prompts(engine, models)
    await engine.drop_adapter("first")
    models["third"] = peft_model(folder, 3)
    del models["first"]
    await engine.load_adapter("third", 2.0, bucket_of(models["third"]))
    await require_close(engine, models, "replaced")
    for name in ("second", "third"):
        await engine.drop_adapter(name)


async def require_close(engine: Any, models: dict[str | None, Any], label: str) -> None:
    asked = {name: requests(name, 4, label) for name in models}
    # Side by side in one batch.
    mixed = [request for row in zip(*asked.values(), strict=True) for request in row]
    responses = {one.request_id: one for one in await engine.generate(mixed)}
    own = {name: [responses[request.request_id] for request in asked[name]] for name in models}
    found = {name: apart(models[name], asked[name], own[name]) for name in models}
    assert max(found.values()) < CLOSE, found
    others = dict(zip(models, [*list(models)[1:], None], strict=True))
    assert all(apart(models[others[name]], asked[name], own[name]) > 0.01 for name in models)


async def require_prompts(engine: Any, models: dict[str | None, Any]) -> None:
    """Log-probs of prompts and the likeliest tokens, with each adapter at once."""
    tokens = np.array(PROMPT * 4, np.int32)
    found = await asyncio.gather(*(engine.prompt_log_probs([tokens, tokens[:1]], 3, name) for name in models))
    for model, (whole, one_token) in zip(models.values(), found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1].double().log_softmax(-1)
        expected = logits.gather(1, torch.tensor(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
        values, ids = logits.topk(3)
        np.testing.assert_allclose(whole.log_probs, expected, atol=CLOSE_PROMPT)
        np.testing.assert_array_equal(whole.top_ids, ids.numpy())
        np.testing.assert_allclose(whole.top_log_probs, values.numpy(), atol=CLOSE_PROMPT)
        assert one_token.log_probs.shape == (0,)
        assert one_token.top_ids.shape == (0, 3)


async def require_refusals(engine: Any, folder: Path, *, most: int, rank: int) -> None:
    """What does not fit is named, and what is loaded stays. `most`, `rank`: of the engine's options."""
    model = peft_model(folder, 1)
    for number in range(most):
        await engine.load_adapter(f"held-{number}", 2.0, bucket_of(model))
    await refused(engine.load_adapter("more", 2.0, bucket_of(model)), f"it holds {most} already")
    await engine.drop_adapter("held-0")
    large = peft_model(folder, 1, targets=("q_proj",), rank=rank + 1)
    await refused(engine.load_adapter("large", 2.0, bucket_of(large)), f"engine.max_adapter_rank = {rank + 1}")
    named = [(f"model.layers.99.mlp.up_proj.lora_{part}.weight", torch.zeros(4, 4)) for part in "AB"]
    elsewhere = make_bucket(named, version=0, index=0, last=True)
    await refused(engine.load_adapter("elsewhere", 2.0, elsewhere), "the model has no such linear layer")
    await refused(engine.generate(requests("held-0", 1, "gone")), 'adapter "held-0" is not loaded')
    asked = requests("held-1", 2, "kept")
    assert apart(model, asked, await engine.generate(asked)) < CLOSE
    # A request whose adapter is dropped ends.
    asked = requests("held-1", 1, "dropped", max_new_tokens=400, min_new_tokens=400)
    running = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(0.2)
    for number in range(1, most):
        await engine.drop_adapter(f"held-{number}")
    assert (await running)[0].finish_reason is FinishReason.ABORT


async def refused(call: Any, words: str) -> None:
    with pytest.raises(EngineRefused, match=re.escape(words)):
        await call
