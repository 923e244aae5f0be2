"""Session: serves an agent's calls with the episode's completions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slime_agents.control_tokens import ControlTokens
from slime_agents.served.constraint import Constraint
from slime_agents.served.conversation import Branch, Conversation, NoRoom
from slime_agents.served.dialogue import AssistantMessage, BadCall, Dialogue
from slime_agents.served.parameters import ADVICE, FREELY, refusal
from slime_core.contracts.generator import Episode
from slime_core.errors import EngineRefused
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_core.types.sample import Sample, Status, VersionSpan
from slime_core.types.trajectory import decode

CUT: Final = "length"


class Ended(Exception):
    """No more responses are served: the run stops, an engine failed, or `max_calls` is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of either API."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    """Of the text that the agent gets."""
    thread: str = ""
    """Calls of different threads never continue each other, even with the same messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    message: AssistantMessage
    finish: str
    """`stop`, `length` or `tool_calls`."""
    stop_sequence: str | None
    number: int
    prompt_tokens: int
    completion: Completion


class Session:
    """Responds to the calls of one agent. It samples as the run does: the trainer assumes that for what it trains."""

    def __init__(
        self,
        episode: Episode,
        control: ControlTokens,
        *,
        max_calls: int,
        fork_threshold: int,
        template_kwargs: Mapping[str, Any],
        ignored_parameters: Sequence[str] = (),
    ) -> None:
        self._episode = episode
        self._max_calls = max_calls
        self.ignored_parameters = ignored_parameters
        self._control = control
        self._dialogue = Dialogue(episode.tokenizer, template_kwargs, control)
        self._fork_threshold = fork_threshold
        self._conversations: dict[str, Conversation] = {}
        self._response_numbers = itertools.count()
        ends = frozenset((*episode.tokenizer.all_special_ids, *episode.sampling.stop_token_ids))
        self._kept = None if episode.kept is None else Kept(episode.kept, ends)
        self._unread: str | None = None
        """Thread of a first message that left no room for a response."""
        self.stored: dict[str, dict[str, Sequence[Mapping[str, Any]]]] = {}
        """Items of the responses of each thread that a later call may name (OpenAI's responses API)."""
        self.num_calls = 0
        self.is_used_up = False
        self.is_aborted = False
        self.failure: Exception | None = None
        self.ended = asyncio.Event()
        """Set when the agent can get no more responses."""

    @property
    def sampling(self) -> SamplingParams:
        return self._episode.sampling

    async def respond_all(self, call: Call, number: int) -> list[Reply]:
        """Generates `number` responses to a call, at the same time. Raises as `respond`."""
        if number > self._max_calls:
            raise BadCall(f"n = {number}: the agent may call {self._max_calls} times (max_calls)", parameter="n")
        if self.num_calls + number > self._max_calls:
            # None at all: the agent would not get those that were still generated.
            raise self._used_up()
        return list(await asyncio.gather(*(self.respond(call) for _ in range(number))))

    async def respond(self, call: Call) -> Reply:
        """Generates the response to a call. BadCall if the call is invalid, Ended if no more calls are served."""
        if self.ended.is_set():
            raise Ended("this run of the agent has ended")
        text, place = self._dialogue.render(call.messages, call.tools, thread=call.thread)
        if self.num_calls >= self._max_calls:
            raise self._used_up()
        number = self.num_calls
        self.num_calls += 1
        conversation = self._conversation(call.thread)
        try:
            branch = conversation.place(text)
        except NoRoom as full:
            return await self._without_room(full.branch, call.thread, number)
        token_ids = branch.token_ids
        room = self._episode.sampling.max_new_tokens - branch.response_length
        limit = room if call.max_tokens is None else min(room, call.max_tokens)
        completion = await self._complete(branch, token_ids, limit, call)
        raw = self._control.decode(completion.token_ids)
        conversation.add_response(branch, raw, completion, number=next(self._response_numbers))
        branch.num_constrained += call.constraint is not None
        if completion.finish_reason is FinishReason.ABORT:
            raise self._aborted()
        tokens, stop_sequence = self._without_end(completion, call.stop)
        message = self._dialogue.parse(
            tokens,
            place,
            turn=number,
            with_tools=bool(call.tools),
            skip_special_tokens=call.skip_special_tokens,
            stop_sequence=stop_sequence,
        )
        finish = (
            CUT if completion.finish_reason is FinishReason.LENGTH else "tool_calls" if message.tool_calls else "stop"
        )
        return Reply(
            message=message,
            finish=finish,
            stop_sequence=stop_sequence,
            number=number,
            prompt_tokens=len(token_ids),
            completion=completion,
        )

    def num_tokens(self, call: Call) -> int:
        """The tokens of the prompt that a call would have. BadCall if it is invalid."""
        text, _ = self._dialogue.render(call.messages, call.tools, thread=call.thread)
        return self._conversation(call.thread).num_tokens(text)

    async def _without_room(self, branch: Branch | None, thread: str, number: int) -> Reply:
        """An empty response of finish `length`: the messages leave no room for another one."""
        nothing = replace(self._episode.sampling, max_new_tokens=0)
        completion = await self._episode.complete(self._episode.prompt.token_ids, nothing)
        if completion.finish_reason is FinishReason.ABORT:
            raise self._aborted()
        if branch is None:
            self._unread = thread
        else:
            branch.is_cut = True
            branch.last_response = next(self._response_numbers)
        return Reply(
            message=AssistantMessage(content=""),
            finish=CUT,
            stop_sequence=None,
            number=number,
            prompt_tokens=0 if branch is None else len(branch.token_ids),
            completion=completion,
        )

    def _used_up(self) -> Ended:
        self.is_used_up = True
        return Ended(f"the agent may call {self._max_calls} times (max_calls)")

    def _aborted(self) -> Ended:
        self.is_aborted = True
        self.ended.set()
        return Ended("the run stops")

    def _conversation(self, thread: str) -> Conversation:
        if thread not in self._conversations:
            self._conversations[thread] = Conversation(
                self._control.encode_at_most,
                fork_threshold=self._fork_threshold,
                max_response=self._episode.sampling.max_new_tokens,
                max_context=self._episode.max_context_len,
            )
        return self._conversations[thread]

    async def _complete(self, branch: Branch, token_ids: npt.NDArray[np.int32], limit: int, call: Call) -> Completion:
        sampling = self._episode.sampling
        stop = tuple(dict.fromkeys((*sampling.stop, *call.stop)))
        known = self._kept.find(token_ids) if self._kept is not None else None
        if known is not None and known.is_open and call.constraint is not None:
            # An engine would begin the grammar again after what is there.
            known = None
        if known is not None and (not known.is_open or self._is_stopped(known.completion, stop)):
            return known.completion
        begun = known.completion if known is not None else None
        sampling = replace(
            sampling,
            max_new_tokens=max(0, limit - (0 if begun is None else len(begun.token_ids))),
            stop=stop,
            structural_tag=None if call.constraint is None else call.constraint.structural_tag,
        )
        asked = token_ids if begun is None else np.concatenate([token_ids, begun.token_ids])
        try:
            completion = await self._episode.complete(asked, sampling)
        except EngineRefused as error:
            branch.is_waiting = False
            if call.constraint is None:
                raise self._failed(error) from error
            reason = f"{ADVICE.get(call.constraint.parameter, FREELY)}. The engine: {str(error).removesuffix('.')}"
            raise refusal(call.constraint.parameter, call.constraint.value, reason) from error
        except Exception as error:
            # Errors of an engine end the episode; the agent only gets that it has ended.
            branch.is_waiting = False
            raise self._failed(error) from error
        return completion if begun is None else after(begun, completion)

    def _failed(self, error: Exception) -> Ended:
        self.failure = error
        self.ended.set()
        return Ended("the engine failed")

    def _is_stopped(self, completion: Completion, stop: tuple[str, ...]) -> bool:
        """Whether its last token completes a stop string."""
        tokens, tokenizer = completion.token_ids, self._episode.tokenizer
        before, text = decode(tokenizer, tokens[:-1]), decode(tokenizer, tokens)
        return any(one in text and text.rindex(one) + len(one) > len(before) for one in stop)

    def _without_end(self, completion: Completion, stop: tuple[str, ...]) -> tuple[npt.NDArray[np.int32], str | None]:
        """The tokens without the end of the turn, and the stop string that their text ends with, or None."""
        tokens = completion.token_ids.tolist()
        ends = set(self._episode.tokenizer.all_special_ids)
        while tokens and completion.finish_reason is FinishReason.STOP and tokens[-1] in ends:
            tokens.pop()
            # A token that the template writes after a response may come before the one that ended it. Others are the model's.
            ends &= self._control.written_ids
        kept = np.array(tokens, np.int32)
        text = decode(self._episode.tokenizer, kept, skip_special_tokens=self._episode.sampling.skip_special_tokens)
        return kept, next((one for one in stop if text.endswith(one)), None)

    def text_of(self, tokens: Sequence[int]) -> str:
        return decode(self._episode.tokenizer, np.array(tokens, np.int32))

    # ---------------------------------------------------------------- samples

    def samples(self, *, is_cut: Callable[[str], bool]) -> list[tuple[str, Sample]]:
        """(thread, sample) of each branch that has a response, ordered by the last response.
        `is_cut`: whether a limit ended this thread."""
        branches = [(thread, branch) for thread, one in self._conversations.items() for branch in one.branches]
        responded = sorted((it for it in branches if it[1].num_responses), key=lambda it: it[1].last_response)
        has_tokens = [any(len(p.token_ids) for p in branch.pieces if p.completion) for _, branch in responded]
        if responded and (self.is_aborted or not any(has_tokens)):
            has_tokens[-1] = True
        if not responded and self._unread is not None:
            return [(self._unread, self._episode.trajectory().finish(status=Status.TRUNCATED))]
        kept = itertools.compress(responded, has_tokens)
        samples = [(thread, self._sample(thread, branch, is_cut(thread))) for thread, branch in kept]
        if samples and self.is_aborted:
            # Also if the agent was not waiting for a response.
            thread, last = samples[-1]
            samples[-1] = thread, replace(last, status=Status.ABORTED)
        return samples

    def _sample(self, thread: str, branch: Branch, is_cut: bool) -> Sample:
        prompt = self._episode.prompt
        if not np.array_equal(prompt.token_ids, branch.prompt.token_ids):
            prompt = replace(
                prompt,
                text=self._control.unmarked(branch.prompt.text),
                token_ids=branch.prompt.token_ids,
                messages=None,
                images=(),
            )
        trajectory = self._episode.trajectory(prompt)
        last = max(number for number, piece in enumerate(branch.pieces) if piece.completion is not None)
        for piece in branch.pieces[1 : last + 1]:
            if piece.completion is None:
                trajectory.append_environment(piece.token_ids)
            else:
                trajectory.append_completion(piece.completion)
        trajectory.counts["agent_answers"] = branch.num_responses
        trajectory.counts["agent_realigned"] = self._conversations[thread].num_realigned
        trajectory.counts["agent_constrained"] = branch.num_constrained
        if trajectory.status is Status.COMPLETED and (is_cut or branch.is_cut):
            return trajectory.finish(status=Status.TRUNCATED)
        return trajectory.finish()


@dataclass(frozen=True, slots=True)
class Known:
    completion: Completion
    is_open: bool
    """Whether it was aborted before its end and must be continued, unless a stop string ends it."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The sample of a partial rollout: its responses are served again to an agent that makes the same calls again."""

    sample: Sample
    ends: frozenset[int]
    """Tokens that end a turn."""

    def find(self, token_ids: npt.NDArray[np.int32]) -> Known | None:
        """The response to this context, or None."""
        sample = self.sample
        start = len(token_ids) - sample.prompt_length
        if not 0 <= start < sample.response_length or not sample.loss_mask[start]:
            return None
        if not np.array_equal(sample.tokens[: len(token_ids)], token_ids):
            return None
        others = np.flatnonzero(sample.loss_mask[start:] == 0)
        end = start + int(others[0]) if len(others) else sample.response_length
        experts = sample.routed_experts
        completion = Completion(
            request_id="kept",
            token_ids=sample.response_tokens[start:end],
            log_probs=sample.rollout_log_probs[start:end],
            finish_reason=FinishReason.STOP,
            spans=tuple(
                VersionSpan(version, max(first, start) - start, min(last, end) - start)
                for version, first, last in sample.spans
                if max(first, start) < min(last, end)
            ),
            routed_experts=None if experts is None else experts[: sample.prompt_length + end - 1],
        )
        is_open = end == sample.response_length and int(sample.tokens[-1]) not in self.ends
        return Known(completion, is_open)


def after(begun: Completion, rest: Completion) -> Completion:
    """Concatenates both into one completion."""
    length = len(begun.token_ids)
    return replace(
        rest,
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]),
        log_probs=np.concatenate([begun.log_probs, rest.log_probs]),
        spans=(*begun.spans, *(VersionSpan(v, s + length, e + length) for v, s, e in rest.spans)),
        # The experts of `rest` cover the whole sequence, if it has a token.
        routed_experts=begun.routed_experts if rest.routed_experts is None else rest.routed_experts,
    )
