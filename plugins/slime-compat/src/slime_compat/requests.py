"""How old generate functions reach the engines: the episode serves `post` at the router's URL.

So these requests are handled like all requests of a run: they work with every engine, pause for weight updates, are sent again
if an engine is lost, and record the policy version of each token. Requests to other URLs go over HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np

from slime_compat.config import REQUEST_TIMEOUT_S
from slime_compat.written_tokens import WrittenTokens
from slime_core.errors import RolloutError
from slime_core.types.completion import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from slime_core.contracts.generator import Episode

ROUTER_HOST: Final = "slime-compat.invalid"
"""`args.sglang_router_ip`. The name never resolves: a request by another client than `post` fails at once, with an error that
contains the name."""
ROUTER_PORT: Final = 30000
ATTEMPTS: Final = 5
LARGEST_RESPONSE: Final = 64 * 2**20
"""Bytes of a response from outside the run."""
PARAMS: Final = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_new_tokens": int,
    "repetition_penalty": float,
}
IGNORED: Final = frozenset({"no_stop_trim", "spaces_between_special_tokens", "sampling_seed", "n"})
"""Parameters that concern only the text, or that the run sets."""


class Asking:
    """The requests of one episode of an old function. The kernel numbers them, so they may run one after another or at once."""

    def __init__(self, episode: Episode, written: WrittenTokens) -> None:
        self.episode = episode
        self.written = written

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Serves SGLang's /generate. RolloutError for parameters that an episode does not support."""
        sampling, trimmed = self._sampling(payload.get("sampling_params") or {})
        if unknown := sorted(
            {"image_data", "video_data", "audio_data", "stream"} & {k for k, v in payload.items() if v}
        ):
            raise RolloutError(
                f"an old generate function called /generate with {', '.join(unknown)}; only tokens are supported."
            )
        tokenizer = self.episode.tokenizer
        ids = payload.get("input_ids")
        if ids is None:
            ids = tokenizer(payload["text"], add_special_tokens=False)["input_ids"]
        if not len(ids) or not isinstance(ids[0], int):
            raise RolloutError(
                "an old generate function called /generate with input_ids that are no list of token ids."
            )
        tokens = np.asarray(ids, np.int32)
        completion = await self.episode.complete(tokens, sampling)
        self.written.add(tokens, completion)
        return self._response(completion, len(tokens), sampling, trimmed)

    def _sampling(self, params: dict[str, Any]) -> tuple[SamplingParams, bool]:
        """The sampling parameters, and whether stop strings are removed from the text."""
        stop, stop_ids = params.get("stop") or (), params.get("stop_token_ids") or ()
        given = {name: kind(params[name]) for name, kind in PARAMS.items() if params.get(name) is not None}
        if params.get("n", 1) != 1:
            raise RolloutError(
                "an old generate function requested several responses at once (n). Send one request for each."
            )
        if unknown := sorted(set(params) - set(PARAMS) - IGNORED - {"stop", "stop_token_ids", "skip_special_tokens"}):
            raise RolloutError(
                f"an old generate function called /generate with sampling_params {', '.join(unknown)}: not supported. "
                f"Known: {', '.join([*PARAMS, 'stop', 'stop_token_ids', 'skip_special_tokens'])}."
            )
        given.setdefault("max_new_tokens", self.episode.sampling.max_new_tokens)
        sampling = SamplingParams(
            **given,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_ids),
            skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        )
        return sampling, not params.get("no_stop_trim", False)

    def _response(self, completion: Completion, asked: int, sampling: SamplingParams, trimmed: bool) -> dict[str, Any]:
        ids: list[int] = completion.token_ids.tolist()
        text = str(self.episode.tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
        finish: dict[str, Any] = {"type": completion.finish_reason.value}
        if completion.finish_reason is FinishReason.LENGTH:
            finish["length"] = len(ids)
        if completion.finish_reason is FinishReason.STOP and ids:
            stopped_by = next((stop for stop in sampling.stop if text.endswith(stop)), None)
            finish["matched"] = stopped_by or ids[-1]
            if stopped_by and trimmed:
                text = text.removesuffix(stopped_by)
        versions = [span.version for span in completion.spans] or [self.episode.versions[-1]]
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": completion.request_id,
                "finish_reason": finish,
                "output_token_logprobs": [
                    [log_prob, token, None] for log_prob, token in zip(completion.log_probs.tolist(), ids, strict=True)
                ],
                "weight_version": str(versions[-1]),
                "prompt_tokens": asked,
                "completion_tokens": len(ids),
                "cached_tokens": completion.cached_tokens,
            },
        }


asking: ContextVar[Asking] = ContextVar("slime_compat_asking")
"""The episode of the current task. Tasks that a function starts inherit it."""


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """Time limit of one request over HTTP, until the end of the response."""

    seconds: float
    option: str
    """Key of the run file that sets it."""


request_limit: ContextVar[RequestLimit] = ContextVar("slime_compat_request_limit")
OUTSIDE: Final = RequestLimit(REQUEST_TIMEOUT_S, "no option sets this limit")
"""Limit of requests from threads that a function started itself; they do not inherit the context."""


@contextmanager
def limited(seconds: float, option: str) -> Iterator[None]:
    """Limits the requests of code that is called inside, and of tasks that it starts."""
    token = request_limit.set(RequestLimit(seconds, option))
    try:
        yield
    finally:
        request_limit.reset(token)


def current(what: str) -> Asking:
    found = asking.get(None)
    if found is None:
        raise RolloutError(
            f"{what} was called outside a generate function; only the generator compat can reach the engines."
        )
    return found


async def post(url: str, payload: Any, max_retries: int = ATTEMPTS, headers: dict[str, str] | None = None) -> Any:
    """Sends JSON, returns JSON. RolloutError for routes of the router other than /generate."""
    address = httpx.URL(url)
    if address.host != ROUTER_HOST:
        return await over_http("POST", url, max_retries, json=payload, headers=headers)
    if address.path != "/generate":
        raise RolloutError(f"an old generate function called {address.path} of the router; only /generate is served.")
    return await current("post").generate(payload)


async def get(url: str) -> Any:
    return await over_http("GET", url, ATTEMPTS)


async def over_http(method: str, url: str, attempts: int, **options: Any) -> Any:
    """Sends a request up to `attempts` times: again after network errors, server errors and timeouts."""
    limit = request_limit.get(OUTSIDE)
    async with httpx.AsyncClient(timeout=limit.seconds) as client:
        for attempt in range(1, attempts + 1):
            try:
                # httpx limits the time between bytes: a slow server could keep the request open for ever.
                async with asyncio.timeout(limit.seconds):
                    return await bounded_json(client, method, url, options)
            except (TimeoutError, httpx.TimeoutException) as error:
                if attempt == attempts:
                    raise httpx.ReadTimeout(
                        f"{method} {url}: no response within {limit.seconds:g} s, {attempts} attempts ({limit.option})"
                    ) from error
            except httpx.HTTPError as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if attempt == attempts or refused:
                    raise
            await asyncio.sleep(min(2.0**attempt, 30.0))
    return None


async def bounded_json(client: httpx.AsyncClient, method: str, url: str, options: Mapping[str, Any]) -> Any:
    """The JSON of a response of at most LARGEST_RESPONSE bytes."""
    body = bytearray()
    async with client.stream(method, url, **options) as response:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > LARGEST_RESPONSE:
                raise RolloutError(f"{method} {url}: the response has more than {LARGEST_RESPONSE} bytes.")
        response.raise_for_status()
    return json.loads(body)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The router's URL. RolloutError for another model than the policy."""
    if getattr(args, "sglang_model_routers", None):
        raise RolloutError(
            f"get_model_url of {model_name}: args.sglang_model_routers has addresses of upstream. Other models are served by "
            "engines.NAME; send requests to their address in args."
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def sampling_params_of(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters in the form that old generate functions get."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if sampling.min_new_tokens:
        params["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1:
        params["repetition_penalty"] = sampling.repetition_penalty
    return params
