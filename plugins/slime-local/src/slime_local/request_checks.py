"""Checks of requests before any of them runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineRefused
from slime_core.types.completion import GenerateRequest
from slime_local.model import RolloutModel
from slime_local.stop_text import StopText


def check_requests(
    requests: Sequence[GenerateRequest],
    engine: str,
    model: RolloutModel,
    stop_text: StopText,
    running_ids: Collection[str],
) -> None:
    """Raises EngineRefused for what cannot be served. `running_ids`: of requests that run or wait already."""
    for params in {request.sampling for request in requests}:
        problem = params.problem(model.vocab_size)
        if problem:
            raise EngineRefused(f"{engine}: {problem}.")
        if params.structural_tag is not None:
            raise EngineRefused(f"{engine}: it has no guided decoding (structural_tag).")
        if params.stop:
            stop_text.prepare()
    counts = Counter(request.request_id for request in requests)
    twice = [name for name, count in counts.items() if count > 1 or name in running_ids]
    if twice:
        raise EngineRefused(f"{engine}: request ids given twice or in use already: {', '.join(sorted(twice)[:8])}.")
    check_tokens([request.token_ids for request in requests], engine, model)
    if model.images is None and (seeing := [r.request_id for r in requests if r.images]):
        raise EngineRefused(f"{engine}: request {seeing[0]} has images, and {type(model.network).__name__} takes none.")
    empty = [request.request_id for request in requests if not len(request.token_ids)]
    if empty:
        raise EngineRefused(f"{engine}: request {empty[0]} has no tokens; a prompt needs at least one.")


def check_tokens(prompts: Sequence[npt.NDArray[np.int32]], engine: str, model: RolloutModel) -> None:
    tokens = np.concatenate(prompts)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= model.vocab_size):
        raise EngineRefused(
            f"{engine}: token ids {tokens.min()} to {tokens.max()} in a prompt; the vocabulary has "
            f"{model.vocab_size}. Prompt and engine must use one tokenizer."
        )


def check_prompts(prompts: Sequence[npt.NDArray[np.int32]], top_k: int, engine: str, model: RolloutModel) -> None:
    """Raises EngineRefused for prompts whose log-probs cannot be computed."""
    if prompts:
        check_tokens(prompts, engine, model)
    if not all(map(len, prompts)):
        raise EngineRefused(f"{engine}: a prompt has no tokens.")
    if not 0 <= top_k <= model.vocab_size:
        raise EngineRefused(f"{engine}: top_k = {top_k}; the vocabulary has {model.vocab_size}.")
