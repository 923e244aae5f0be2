"""Log-probs of prompts, with adapters of the output layer. vLLM multiplies a prompt's rows by the adapters of the batch's
requests, one for each request and not for each row: with several requests a server on a CPU ends, and elsewhere rows would get
another request's adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Final

from torch import Tensor

PROMPTS: Final = "_get_prompt_logprobs_dict"
HEADS: Final = "add_lora_logits"
NONE: Final = -1


class PromptHeads:
    """Each prompt by itself, with the adapter of its request."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, with adapters."""
        self._runner = runner
        self._place: int | None = None
        """Of the adapter that all rows have; `NONE`: none; None: outside of prompts."""

    @classmethod
    def use(cls, runner: Any) -> None:
        """From now on; a second call changes nothing."""
        original = getattr(runner, PROMPTS)
        if getattr(original, "__wrapped__", None) is not None:
            return
        heads = cls(runner)
        setattr(runner, PROMPTS, wraps(original)(partial(heads.each, original)))
        manager = runner.lora_manager._adapter_manager
        for punica in {id(one): one for module in manager.modules.values() if (one := wrapper_of(module))}.values():
            setattr(punica, HEADS, partial(heads.add, getattr(punica, HEADS)))

    def each(
        self, original: Callable[..., dict[str, Any]], hidden_states: Tensor, num_scheduled: Any
    ) -> dict[str, Any]:
        runner, found = self._runner, {}
        left: dict[str, Any] = {}
        for request, count in list(runner.num_prompt_logprobs.items()):
            # The original takes a request out when its prompt is through.
            runner.num_prompt_logprobs = {request: count}
            with self._using(request):
                found |= original(hidden_states, num_scheduled)
            left |= runner.num_prompt_logprobs
        runner.num_prompt_logprobs = left
        return found

    @contextlib.contextmanager
    def _using(self, request: str) -> Iterator[None]:
        asked = self._runner.requests[request].lora_request
        places = self._runner.lora_manager._adapter_manager.lora_index_to_id
        self._place = NONE if asked is None else places.index(asked.lora_int_id)
        try:
            yield
        finally:
            self._place = None

    def add(
        self, original: Callable[..., Any], y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, **kwargs: Any
    ) -> Any:
        """y: (rows, V or more) logits, to which s B A x is added. a: (places, 1, R, H), b: (places, 1, V, R)."""
        if self._place is None:
            return original(y, x, a, b, scale, **kwargs)
        if self._place != NONE:
            reduced = x.float() @ a[self._place, 0].float().T
            added = (reduced @ b[self._place, 0].float().T * scale).to(y.dtype)
            # The logits are padded.
            y[:, : added.shape[1]] += added
        return y


def wrapper_of(module: Any) -> Any | None:
    return getattr(module, "punica_wrapper", None)
