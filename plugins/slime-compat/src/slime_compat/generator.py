"""OldGenerator: calls an old generate function."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_compat.config import CompatGeneratorConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import parameters, resolve, takes, takes_keyword, wrong_form
from slime_compat.old_sample import Sample as Old
from slime_compat.old_sample import old_prompt, old_sample
from slime_compat.requests import ROUTER_HOST, ROUTER_PORT, Asking, asking, limited, sampling_params_of
from slime_compat.written_tokens import WrittenTokens
from slime_core.contracts.generator import Episode, Generator
from slime_core.errors import PluginError, RolloutError
from slime_core.types.sample import Sample, Status, VersionSpan
from slime_core.types.trajectory import clean_text, decode

FORMS = "(args, sample, sampling_params) or (args, samples, evaluation)"


class OldGenerator(Generator):
    def __init__(self, config: CompatGeneratorConfig) -> None:
        """PluginError if the function is missing, has another signature, or would block the event loop."""
        self._config = config
        self._function = resolve(config.path, config.python_path, where="generate.path")
        self._of_lists = parameters(self._function)[1:2] == ["samples"]
        if not takes(self._function, 2 if self._of_lists else 3):
            raise wrong_form(config.path, self._function, "generate.path", FORMS)
        if not inspect.iscoroutinefunction(self._function):
            raise PluginError(
                f'generate.path = "{config.path}": it is no coroutine (async def), so it would block the run while it waits.'
            )
        self._evaluation = takes_keyword(self._function, "evaluation")

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        """RolloutError if the function returns no valid sample."""
        if episode.prompt.images:
            raise RolloutError(f'generate.path = "{self._config.path}": old generate functions get no images.')
        index = episode.trajectory().index
        written = WrittenTokens(episode.kept)
        token = asking.set(Asking(episode, written))
        try:
            with limited(self._config.request_timeout, "generate.request_timeout"):
                returned = await self._call(episode, index)
        finally:
            asking.reset(token)
        listed = returned if isinstance(returned, list | tuple) else [returned]
        return [self._sample(old, episode, index, written) for old in listed]

    async def _call(self, episode: Episode, index: int) -> Any:
        old = old_prompt(episode.prompt, index) if episode.kept is None else old_sample(episode.kept)
        args = OldArgs(self._defaults(episode) | self._config.args, "generate.args")
        keywords = {"evaluation": episode.evaluation} if self._evaluation else {}
        if self._of_lists:
            return await self._function(args, [old], **keywords)
        return await self._function(args, old, sampling_params_of(episode.sampling), **keywords)

    def _defaults(self, episode: Episode) -> dict[str, Any]:
        """Attributes of `args` from the episode. The router's address is always the one that `post` intercepts."""
        return {
            "sglang_router_ip": ROUTER_HOST,
            "sglang_router_port": ROUTER_PORT,
            "sglang_server_concurrency": 512,
            "rollout_temperature": episode.sampling.temperature,
            "rollout_top_p": episode.sampling.top_p,
            "rollout_top_k": episode.sampling.top_k,
            "rollout_max_response_len": episode.sampling.max_new_tokens,
            "rollout_max_context_len": episode.max_context_len,
            "partial_rollout": False,
            "use_rollout_routing_replay": False,
        }

    def _sample(self, old: Any, episode: Episode, index: int, written: WrittenTokens) -> Sample:
        """Converts the returned sample to the kernel's."""
        fail = self._failure(index)
        if not all(
            hasattr(old, name) for name in Old.__dataclass_fields__ if name in ("tokens", "response_length", "status")
        ):
            raise fail(f"returned {type(old).__name__}; it must return a Sample or a list of Samples")
        # A response that was aborted before its first request has no tokens yet.
        tokens = np.asarray(old.tokens if len(old.tokens) else episode.prompt.token_ids, np.int32)
        length = int(old.response_length)
        start = len(tokens) - length
        if start < 1 or length < 0:
            raise fail(f"has {len(tokens)} tokens and response_length {length}, which leaves {start} for the prompt")
        mask = np.ones(length, np.uint8) if old.loss_mask is None else np.asarray(old.loss_mask, np.uint8)
        if len(mask) != length:
            raise fail(f"has a loss_mask of {len(mask)} and response_length {length}")
        found = written.find(tokens)
        log_probs = found.log_probs[start:].copy()
        unknown = (mask == 1) & ~found.known[start:]
        if unknown.any():
            log_probs[unknown] = self._given(old, unknown, length, fail)
        log_probs[mask == 0] = 0
        spans = tuple(span for span in response_spans(found.spans, start))
        prompt = episode.prompt
        if not np.array_equal(tokens[:start], prompt.token_ids):
            text = str(episode.tokenizer.decode(tokens[:start].tolist(), skip_special_tokens=False))
            prompt = replace(prompt, token_ids=tokens[:start], text=text)
        oldest = min(written.versions, default=episode.versions[-1])
        number, parts = self._reward(old.reward, fail)
        return Sample(
            index=index,
            group_index=episode.prompt.group_index,
            rollout_id=index,
            prompt=prompt,
            tokens=tokens,
            prompt_length=start,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            response=self._text(str(old.response), tokens[start:], mask, episode),
            raw_response=str(old.response),
            spans=with_unknown(spans, unknown, oldest),
            status=self._status(old.status, fail),
            reward=number,
            reward_parts=parts,
            remove_sample=bool(old.remove_sample),
            metadata=dict(old.metadata or {}),
            routed_experts=found.routed_experts,
        )

    def _given(
        self, old: Any, unknown: npt.NDArray[np.bool_], length: int, fail: Any
    ) -> npt.NDArray[np.float32] | float:
        """Log-probs that the function returned, at the tokens that no engine generated."""
        given = old.rollout_log_probs
        if given is not None and len(given) == length:
            return np.asarray(given, np.float32)[unknown]
        if given is not None and len(given):
            raise fail(f"has {len(given)} rollout_log_probs and response_length {length}")
        if self._config.missing_log_probs == "zero":
            return 0.0
        first = int(np.flatnonzero(unknown)[0])
        raise fail(
            f"trains {int(unknown.sum())} response tokens, the first at {first}, that no engine generated after the tokens "
            "before them: probably the function tokenized text again. Append the ids of output_token_logprobs instead, set "
            "loss_mask to 0 there, set rollout_log_probs, or set generate.missing_log_probs to zero"
        )

    def _text(self, given: str, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], episode: Episode) -> str:
        """The response without special tokens; a text that is not that of the tokens stays as it was returned."""
        is_of_tokens = given == decode(episode.tokenizer, tokens)
        return clean_text(episode.tokenizer, tokens, mask) if is_of_tokens else given

    def _status(self, status: Any, fail: Any) -> Status:
        try:
            known = Status(getattr(status, "value", status))
        except ValueError:
            raise fail(f"has status {status!r}; it must be one of {', '.join(Status)}") from None
        # Upstream trains samples whose status is not set like completed ones.
        return Status.COMPLETED if known is Status.PENDING else known

    def _reward(self, reward: Any, fail: Any) -> tuple[float | None, dict[str, float]]:
        if reward is None:
            return None, {}
        if not isinstance(reward, dict):
            return float(reward), {}
        key = self._config.args.get("reward_key")
        numbers = {str(name): float(value) for name, value in reward.items() if isinstance(value, Real)}
        if key not in numbers:
            raise fail(f"has rewards {sorted(numbers)}; set generate.args.reward_key to the one to train on")
        return numbers[key], numbers

    def _failure(self, index: int) -> Any:
        def fail(what: str) -> RolloutError:
            return RolloutError(f'generate.path = "{self._config.path}": sample {index} {what}.')

        return fail


def response_spans(spans: Sequence[VersionSpan], start: int) -> list[VersionSpan]:
    """The spans of the response, which begins at `start`, relative to its beginning."""
    moved = [VersionSpan(v, max(s - start, 0), e - start) for v, s, e in spans]
    return [span for span in moved if span.end > span.start]


def with_unknown(spans: Sequence[VersionSpan], unknown: npt.NDArray[np.bool_], version: int) -> tuple[VersionSpan, ...]:
    """Adds spans of `version`, the oldest, for trained tokens that no engine generated."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unknown.astype(np.int8), [0]])))
    runs = [VersionSpan(version, int(s), int(e)) for s, e in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(sorted([*spans, *runs], key=lambda span: span.start))
