"""Scenes with an engine on the tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from slime_core.contracts.engine import RolloutEngine
from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import Completion, GenerateRequest, SamplingParams
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.tiny_model import ALPHABET, FIRST_TOKEN, log_probs_of, prompts

NATS: Final = 1e-4
"""What float32 may be off by."""
CONTEXT: Final = 600
LONG: Final = 256
"""Tokens that take an engine a while."""
TEXT: Final = {FIRST_TOKEN + place: character for place, character in enumerate(ALPHABET)}
"""Token id to text; the end of a sequence has none."""

Scene = Callable[[RolloutEngine], Awaitable[None]]


@asynccontextmanager
async def started(case: Case, model: Path) -> AsyncIterator[RolloutEngine]:
    engine: RolloutEngine = case.build()
    await engine.start(
        EngineSetup(
            index=0,
            model_path=model,
            device="cpu",
            seed=0,
            max_context_len=CONTEXT,
            max_batch=32,
            run_dir=model.parent,
        )
    )
    try:
        yield engine
    finally:
        await engine.stop()


def play(case: Case, model: Path, scene: Scene) -> None:
    """The scene with an engine that has started; AssertionError if it takes for ever."""

    async def whole() -> None:
        async with started(case, model) as engine:
            await scene(engine)

    run(whole())


def ask(number: int, prompt: npt.ArrayLike, *, seed: int = 0, name: str = "", **sampling: Any) -> GenerateRequest:
    params: dict[str, Any] = {"max_new_tokens": 12} | sampling
    return GenerateRequest(
        request_id=name or f"test/{number}/0",
        token_ids=np.asarray(prompt, np.int32),
        sampling=SamplingParams(**params),
        seed=1000 * seed + number,
    )


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]


@torch.no_grad()
def require_true_log_probs(model: Any, request: GenerateRequest, got: Completion, *, what: str = "") -> None:
    """Those that transformers gives to the tokens that were sampled."""
    temperature = request.sampling.temperature or 1.0
    expected = log_probs_of(model, request.token_ids.tolist(), tokens_of(got), temperature)[0].numpy()
    assert len(got.log_probs) == len(got.token_ids), f"{len(got.token_ids)} tokens, {len(got.log_probs)} log-probs"
    apart = np.abs(got.log_probs - expected)
    assert apart.max(initial=0.0) <= NATS, (
        f"{what or 'log-probs'} at temperature {request.sampling.temperature} are off by {apart.max():.3g} nats, "
        f"at token {int(apart.argmax())} of {len(apart)}: {got.log_probs[:4]}, should be {expected[:4]}"
    )


def long(number: int, **more: Any) -> GenerateRequest:
    """A request that runs to its budget."""
    return ask(number, prompts(1, seed=6 + number)[0], max_new_tokens=LONG, min_new_tokens=LONG, **more)
