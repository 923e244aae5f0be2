"""Trajectory: collects the tokens of one response, from the model and from its environment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.prompt import Prompt
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import Sample, Status, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATUS_OF_FINISH = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


class Trajectory:
    """Tokens, mask and log-probs of equal length: mask 1 for the model's, mask 0 and log-prob 0 for tools and others."""

    def __init__(self, prompt: Prompt, *, index: int, rollout_id: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self.prompt = prompt
        self.index = index
        self.rollout_id = rollout_id
        self._tokenizer = tokenizer
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._mask: list[npt.NDArray[np.uint8]] = []
        self._log_probs: list[npt.NDArray[np.float32]] = []
        self._spans: list[VersionSpan] = []
        self._length = 0
        self._routed_experts: RoutedExperts | None = None
        self.status = Status.PENDING
        self.counts: Counter[str] = Counter()
        """Counters for the generator, such as turns and tool calls; their means are metrics."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(T,) int32, prompt and response so far: the tokens of the next request."""
        return np.concatenate([self.prompt.token_ids, *self._tokens])

    @property
    def response_length(self) -> int:
        return self._length

    @property
    def last_turn(self) -> npt.NDArray[np.int32]:
        """Tokens of the model since the last ones of the environment; several completions if a partial rollout continued."""
        tokens = np.concatenate([np.empty(0, np.int32), *self._tokens])
        by_model = np.concatenate([np.empty(0, np.uint8), *self._mask])
        # Tokens that a partial rollout kept may be masked; a policy sampled them nevertheless.
        for _, start, end in self._spans:
            by_model[start:end] = 1
        written_by_others = np.flatnonzero(by_model == 0)
        return tokens[written_by_others[-1] + 1 :] if len(written_by_others) else tokens

    def append_completion(self, completion: Completion) -> None:
        """Appends the model's tokens and sets the status from the finish reason."""
        length = len(completion.token_ids)
        if len(completion.log_probs) != length:
            raise EngineError(
                f"request {completion.request_id}: the engine responded with {length} tokens and "
                f"{len(completion.log_probs)} log-probs"
            )
        self._spans += [VersionSpan(v, s + self._length, e + self._length) for v, s, e in completion.spans if e > s]
        self._append(completion.token_ids, np.ones(length, np.uint8), completion.log_probs)
        self.status = STATUS_OF_FINISH[completion.finish_reason]
        self._route(completion)

    def _route(self, completion: Completion) -> None:
        """Takes the completion's expert ids, which cover the whole sequence."""
        ids = completion.routed_experts
        if ids is None:
            return
        read = len(self.prompt.token_ids) + self._length - 1
        if len(ids) < read:
            raise EngineError(
                f"request {completion.request_id}: the response has expert ids of {len(ids)} tokens, but the trajectory has "
                f"{read} before its last: the request did not continue this trajectory."
            )
        # A generator may have cut the end of the completion.
        self._routed_experts = ids[:read]

    def append_environment(self, token_ids: npt.ArrayLike) -> None:
        """Appends int32 tokens of a tool or the environment, which the model reads and which are never trained on."""
        tokens = np.asarray(token_ids, np.int32)
        self._append(tokens, np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32))

    def finish(
        self, *, status: Status | None = None, reward: float | None = None, metadata: dict[str, Any] | None = None
    ) -> Sample:
        """Returns the sample. status: overrides that of the last completion; metadata: added to the prompt's."""
        response, mask = joined(self._tokens, np.int32), joined(self._mask, np.uint8)
        text, raw = texts_of(self._tokenizer, response, mask)
        return Sample(
            index=self.index,
            group_index=self.prompt.group_index,
            rollout_id=self.rollout_id,
            prompt=self.prompt,
            tokens=np.concatenate([self.prompt.token_ids, response]),
            prompt_length=len(self.prompt.token_ids),
            loss_mask=mask,
            rollout_log_probs=joined(self._log_probs, np.float32),
            response=text,
            raw_response=raw,
            spans=tuple(self._spans),
            status=status or self.status,
            reward=reward,
            metadata={**self.prompt.metadata, **(metadata or {})},
            routed_experts=self._routed_experts,
            counts=dict(self.counts),
        )

    def restart_from(self, sample: Sample) -> None:
        """Continues from the tokens, mask, log-probs, spans, expert ids and counts that a partial rollout kept."""
        self._append(sample.response_tokens, sample.loss_mask, sample.rollout_log_probs)
        self._spans += list(sample.spans)
        self._routed_experts = sample.routed_experts
        self.counts.update(sample.counts)
        self.status = sample.status

    def _append(
        self, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], log_probs: npt.NDArray[np.float32]
    ) -> None:
        self._tokens.append(np.asarray(tokens, np.int32))
        self._mask.append(mask)
        self._log_probs.append(np.asarray(log_probs, np.float32))
        self._length += len(tokens)


def joined(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    """A copy, also of one part: it may be a view of an engine's whole response."""
    return parts[0].copy() if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def without_untrained_end(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Cuts the response after its last token that is trained or that a policy sampled: what follows, such as the output of a
    tool beyond the budget, costs memory and computation and has no gradient. A response without such a token, and one that a
    partial rollout will continue, stay as they are."""
    if sample.loss_mask[-1:].any():
        return sample
    trained = np.flatnonzero(sample.loss_mask)
    end = max(int(trained[-1]) + 1 if len(trained) else 0, *(e for _, s, e in sample.spans if e > s), 0)
    if sample.status is Status.ABORTED or not 0 < end < sample.response_length:
        return sample
    text, raw = texts_of(tokenizer, sample.response_tokens[:end], sample.loss_mask[:end])
    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length + end].copy(),
        loss_mask=sample.loss_mask[:end].copy(),
        rollout_log_probs=sample.rollout_log_probs[:end].copy(),
        response=text,
        raw_response=raw,
        spans=tuple(span for span in sample.spans if span.end <= end),
        # A reward of tokens that are not trained is part of the rest of the reward.
        span_rewards=tuple(r._replace(end=min(r.end, end)) for r in sample.span_rewards if r.start < end),
    )


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: npt.NDArray[np.int32], *, skip_special_tokens: bool = False
) -> str:
    """Text of the tokens, special ones included unless skipped. Calls the fast tokenizer directly if the wrapper would not
    change its result: that is several times faster, and every response is decoded."""
    is_fast = tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces
    decoder = tokenizer.backend_tokenizer if is_fast else tokenizer
    return str(decoder.decode(tokens.tolist(), skip_special_tokens=skip_special_tokens))


def texts_of(
    tokenizer: PreTrainedTokenizerBase, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]
) -> tuple[str, str]:
    """`Sample.response` and `Sample.raw_response`: one object where they are equal."""
    if (special := _special_ids(tokenizer)) is not None and special.isdisjoint(tokens[:-1].tolist()):
        if not len(tokens) or (last := int(tokens[-1])) not in special:
            return (clean := decode(tokenizer, tokens)), clean
        return (clean := decode(tokenizer, tokens[:-1])), clean + _special_text(tokenizer, last)
    raw, clean = decode(tokenizer, tokens), clean_text(tokenizer, tokens, mask)
    return (raw if clean == raw else clean), raw


@lru_cache(maxsize=64)
def _special_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return decode(tokenizer, np.array([token], np.int32))


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int] | None:
    """None for a tokenizer whose text of tokens and a special one after them is not always the text of both."""
    from tokenizers import decoders

    fast = tokenizer.backend_tokenizer if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces else None
    if fast is None or not isinstance(fast.decoder, (decoders.ByteLevel, decoders.Fuse)):
        return None
    return frozenset(number for number, token in fast.get_added_tokens_decoder().items() if token.special)


def clean_text(tokenizer: PreTrainedTokenizerBase, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> str:
    """Text of response tokens without special ones; mask: 1 = the model's, 0 = the environment's. Where only special tokens
    separate the model's text from the environment's, a line break does: "12" and "34" must not become 1234."""
    turns = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    clean = [decode(tokenizer, tokens[cut - 1 : cut + 1], skip_special_tokens=True) for cut in turns]
    cuts = [cut for cut, text in zip(turns, clean, strict=True) if text != decode(tokenizer, tokens[cut - 1 : cut + 1])]
    text = ""
    for part in np.split(tokens, cuts):
        added = decode(tokenizer, part, skip_special_tokens=True)
        is_joined = text and added and not text[-1].isspace() and not added[0].isspace()
        text += f"\n{added}" if is_joined else added
    return text
