"""Trajectory: tokens of one answer as they come in, from the model and from its environment."""

from __future__ import annotations

from collections import Counter
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
    """Tokens, mask, log-probs and version spans grow together, so they have equal length at all times.

    What the model wrote is appended with mask 1; what a tool or another agent wrote with mask 0 and log-prob 0.
    """

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
        """Turns, calls of tools and the like, for whoever grows it to count; their means are metrics."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(T,) prompt and response so far: what to continue from."""
        return np.concatenate([self.prompt.token_ids, *self._tokens])

    @property
    def response_length(self) -> int:
        return self._length

    @property
    def last_turn(self) -> npt.NDArray[np.int32]:
        """What the model has written since the environment wrote last; several completions if a partial rollout went on."""
        mask = np.concatenate([np.empty(0, np.uint8), *self._mask])
        tokens = np.concatenate([np.empty(0, np.int32), *self._tokens])
        written_by_others = np.flatnonzero(mask == 0)
        return tokens[written_by_others[-1] + 1 :] if len(written_by_others) else tokens

    def append_completion(self, completion: Completion) -> None:
        """What the model wrote. Sets the status from the finish reason."""
        length = len(completion.token_ids)
        if len(completion.log_probs) != length:
            raise EngineError(
                f"request {completion.request_id}: the engine answered with {length} tokens and "
                f"{len(completion.log_probs)} log-probs"
            )
        self._spans += [VersionSpan(v, s + self._length, e + self._length) for v, s, e in completion.spans if e > s]
        self._append(completion.token_ids, np.ones(length, np.uint8), completion.log_probs)
        self.status = STATUS_OF_FINISH[completion.finish_reason]
        self._route(completion)

    def _route(self, completion: Completion) -> None:
        """The answer's expert ids are those of the whole sequence that it ends."""
        ids = completion.routed_experts
        if ids is None:
            return
        read = len(self.prompt.token_ids) + self._length - 1
        if len(ids) < read:
            raise EngineError(
                f"request {completion.request_id}: the answer has expert ids of {len(ids)} tokens, and the trajectory that it "
                f"was appended to has {read} before its last: it was not asked to continue this one."
            )
        # A generator may have left out the end of the answer.
        self._routed_experts = ids[:read]

    def append_environment(self, token_ids: npt.ArrayLike) -> None:
        """What a tool or the environment wrote: seen by the model, never trained."""
        tokens = np.asarray(token_ids, np.int32)
        self._append(tokens, np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32))

    def finish(
        self, *, status: Status | None = None, reward: float | None = None, metadata: dict[str, Any] | None = None
    ) -> Sample:
        """The sample. `status` overrides what the last completion said."""
        response = np.concatenate([np.empty(0, np.int32), *self._tokens])
        return Sample(
            index=self.index,
            group_index=self.prompt.group_index,
            rollout_id=self.rollout_id,
            prompt=self.prompt,
            tokens=np.concatenate([self.prompt.token_ids, response]),
            prompt_length=len(self.prompt.token_ids),
            loss_mask=np.concatenate([np.empty(0, np.uint8), *self._mask]),
            rollout_log_probs=np.concatenate([np.empty(0, np.float32), *self._log_probs]),
            response=decode(self._tokenizer, response),
            spans=tuple(self._spans),
            status=status or self.status,
            reward=reward,
            metadata={**self.prompt.metadata, **(metadata or {})},
            routed_experts=self._routed_experts,
            counts=dict(self.counts),
        )

    def restart_from(self, sample: Sample) -> None:
        """Takes over what a partial rollout kept: tokens, mask, log-probs, spans, expert ids, counts."""
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


def decode(tokenizer: PreTrainedTokenizerBase, tokens: npt.NDArray[np.int32]) -> str:
    """The text of these tokens, special ones included.

    Where the tokenizer adds nothing of its own to the fast one inside it, that is asked directly: decoding is once per
    answer, and the way around it costs several times as much.
    """
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.backend_tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
