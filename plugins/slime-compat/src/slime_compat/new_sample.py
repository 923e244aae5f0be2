"""SampleConversion: the kernel's samples from those that old functions return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_compat.old_sample import Sample as Old
from slime_compat.written_tokens import WrittenTokens
from slime_core.errors import RolloutError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, Status, VersionSpan
from slime_core.types.trajectory import clean_text, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Failure: TypeAlias = Callable[[str], RolloutError]
TEACHER: Final = (
    "has teacher_log_probs, which a run computes itself: serve the teacher with engines.teacher and add the advantage term "
    "reverse_kl (slime-distill)"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleConversion:
    asked: str
    """Key and path of the function, for messages: `generate.path = "..."`."""
    table: str
    """Table of the run file that has its options: `generate`."""
    reward_key: str | None
    missing_log_probs: Literal["error", "zero"]
    tokenizer: PreTrainedTokenizerBase

    def convert(
        self,
        old: Any,
        *,
        prompt: Prompt,
        index: int,
        written: WrittenTokens,
        version: int,
        rollout_id: int | None = None,
    ) -> Sample:
        """RolloutError, with what to change, for a sample that cannot be trained. version: of trained tokens that no engine
        wrote, if no token was written. rollout_id: None: that of the sample, else its index."""
        fail = self.failure(index)
        if not all(hasattr(old, name) for name in ("tokens", "response_length", "status")):
            raise fail(f"is of type {type(old).__name__}; it must be a Sample")
        # A response that was aborted before its first request has no tokens yet.
        tokens = np.asarray(old.tokens if len(old.tokens) else prompt.token_ids, np.int32)
        length = int(old.response_length)
        start = len(tokens) - length
        if start < 1 or length < 0:
            raise fail(f"has {len(tokens)} tokens and response_length {length}, which leaves {start} for the prompt")
        if old.teacher_log_probs is not None:
            raise fail(TEACHER)
        mask = mask_of(old, length, fail)
        found = written.find(tokens)
        log_probs = found.log_probs[start:].copy()
        unknown = (mask == 1) & ~found.known[start:]
        if unknown.any():
            log_probs[unknown] = self._given(old, unknown, length, fail)
        log_probs[mask == 0] = 0
        spans = response_spans(found.spans, start)
        group_index = prompt.group_index
        if not np.array_equal(tokens[:start], prompt.token_ids):
            text = str(self.tokenizer.decode(tokens[:start].tolist(), skip_special_tokens=False))
            prompt = replace(prompt, token_ids=tokens[:start], text=text)
        number, parts = self.reward(old.reward, fail)
        return Sample(
            index=index,
            group_index=group_index,
            rollout_id=index if rollout_id is None else rollout_id,
            prompt=prompt,
            tokens=tokens,
            prompt_length=start,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            response=self._text(str(old.response), tokens[start:], mask),
            raw_response=str(old.response),
            spans=with_unknown(spans, unknown, min(written.versions, default=version)),
            status=status_of(old.status, fail),
            reward=number,
            reward_parts=parts,
            remove_sample=bool(old.remove_sample),
            metadata=dict(old.metadata or {}),
            routed_experts=found.routed_experts,
        )

    def applied(self, sample: Sample, old: Old) -> Sample:
        """The kernel's sample with what a function set on its copy `old`, whose tokens are the same. RolloutError if it trains
        tokens that were masked, such as those of a tool."""
        fail = self.failure(sample.index)
        if old.teacher_log_probs is not None:
            raise fail(TEACHER)
        mask = mask_of(old, sample.response_length, fail)
        if (mask > sample.loss_mask).any():
            raise fail("has a loss_mask of 1 at tokens that were masked: they have no log-probs of the engine")
        number, parts = sample.reward, dict(sample.reward_parts)
        if old.reward != (parts or number):
            number, parts = self.reward(old.reward, fail)
        return replace(
            sample,
            rollout_id=sample.rollout_id if old.rollout_id is None else old.rollout_id,
            loss_mask=mask,
            rollout_log_probs=np.where(mask, sample.rollout_log_probs, np.float32(0)),
            status=status_of(old.status, fail),
            reward=number,
            reward_parts=parts,
            remove_sample=bool(old.remove_sample),
            metadata=dict(old.metadata or {}),
        )

    def _given(
        self, old: Any, unknown: npt.NDArray[np.bool_], length: int, fail: Failure
    ) -> npt.NDArray[np.float32] | float:
        """Log-probs that the function returned, at the tokens that no engine generated."""
        given = old.rollout_log_probs
        if given is not None and len(given) == length:
            return np.asarray(given, np.float32)[unknown]
        if given is not None and len(given):
            raise fail(f"has {len(given)} rollout_log_probs and response_length {length}")
        if self.missing_log_probs == "zero":
            return 0.0
        first = int(np.flatnonzero(unknown)[0])
        raise fail(
            f"trains {int(unknown.sum())} response tokens, the first at {first}, that no engine generated after the tokens "
            "before them: probably the function tokenized text again. Append the ids of output_token_logprobs instead, set "
            f"loss_mask to 0 there, set rollout_log_probs, or set {self.table}.missing_log_probs to zero"
        )

    def _text(self, given: str, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> str:
        """The response without special tokens; a text that is not that of the tokens stays as it was returned."""
        is_of_tokens = given == decode(self.tokenizer, tokens)
        return clean_text(self.tokenizer, tokens, mask) if is_of_tokens else given

    def reward(self, reward: Any, fail: Failure) -> tuple[float | None, dict[str, float]]:
        """The number to train on, and all named numbers."""
        if reward is None:
            return None, {}
        if not isinstance(reward, Mapping):
            return float(reward), {}
        numbers = {str(name): float(value) for name, value in reward.items() if isinstance(value, Real)}
        if self.reward_key not in numbers:
            raise fail(f"has rewards {sorted(numbers)}; set {self.table}.args.reward_key to the one to train on")
        return numbers[self.reward_key], numbers

    def failure(self, index: int) -> Failure:
        return lambda what: RolloutError(f"{self.asked}: sample {index} {what}.")


def mask_of(old: Old, length: int, fail: Failure) -> npt.NDArray[np.uint8]:
    mask = np.ones(length, np.uint8) if old.loss_mask is None else np.asarray(old.loss_mask)
    if len(mask) != length:
        raise fail(f"has a loss_mask of {len(mask)} and response_length {length}")
    if not np.isin(mask, (0, 1)).all():
        raise fail("has a loss_mask with other numbers than 0 and 1")
    return mask.astype(np.uint8)


def status_of(status: Any, fail: Failure) -> Status:
    try:
        known = Status(getattr(status, "value", status))
    except ValueError:
        raise fail(f"has status {status!r}; it must be one of {', '.join(Status)}") from None
    # Upstream trains samples whose status is not set like completed ones.
    return Status.COMPLETED if known is Status.PENDING else known


def response_spans(spans: Sequence[VersionSpan], start: int) -> list[VersionSpan]:
    """The spans of the response, which begins at `start`, relative to its beginning."""
    moved = [VersionSpan(v, max(s - start, 0), e - start) for v, s, e in spans]
    return [span for span in moved if span.end > span.start]


def with_unknown(spans: Sequence[VersionSpan], unknown: npt.NDArray[np.bool_], version: int) -> tuple[VersionSpan, ...]:
    """Adds spans of `version`, the oldest, for trained tokens that no engine generated."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unknown.astype(np.int8), [0]])))
    runs = [VersionSpan(version, int(s), int(e)) for s, e in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(sorted([*spans, *runs], key=lambda span: span.start))
