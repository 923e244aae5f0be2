"""search_r1: the model searches, reads and answers in turns (Search-R1, Jin et al., 2503.09516, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slime_core.contracts.generator import Episode, Generator
from slime_core.types.sample import Sample, Status
from slime_core.types.trajectory import Trajectory, decode
from slime_search_r1.document import listing
from slime_search_r1.searches import Searches
from slime_search_r1.tags import INVALID, TURN_ENDS, Action, Kind, action_of, without_tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE: Final = "\n\n<information>"
AFTER: Final = "</information>\n\n"
CHARS_PER_TOKEN: Final = 16
"""Texts are cut to this many characters per allowed token before they are tokenized: few tokens are longer."""


class SearchR1Generator(Generator):
    """The token budget includes the documents that the model reads. A response is truncated when the budget, the context or
    the turns are used up. A partial rollout continues in the turn in which it was aborted."""

    def __init__(self, searches: Searches, *, max_turns: int, max_information_tokens: int) -> None:
        self._searches = searches
        self._max_turns = max_turns
        self._max_information_tokens = max_information_tokens

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        trajectory = episode.trajectory()
        budget = response_budget(episode)
        sampling = replace(episode.sampling, stop=tuple(dict.fromkeys((*episode.sampling.stop, *TURN_ENDS))))
        # A partial rollout may hold a turn that had ended before it was aborted.
        action = last_action(trajectory, episode.tokenizer)
        while True:
            if action.kind is Kind.INVALID:
                room = budget - trajectory.response_length
                if room <= 0 or trajectory.counts["turns"] >= self._max_turns:
                    return [trajectory.finish(status=Status.TRUNCATED)]
                completion = await episode.complete(trajectory.tokens, replace(sampling, max_new_tokens=room))
                trajectory.append_completion(completion)
                if trajectory.status is Status.ABORTED:
                    return [trajectory.finish()]
                action = last_action(trajectory, episode.tokenizer)
            trajectory.counts["turns"] += 1
            if action.kind is Kind.ANSWER:
                return [trajectory.finish(status=Status.COMPLETED)]
            if trajectory.status is Status.TRUNCATED or trajectory.counts["turns"] >= self._max_turns:
                return [trajectory.finish(status=Status.TRUNCATED)]
            addition = await self._reply(action, trajectory, episode.tokenizer)
            if trajectory.response_length + len(addition) >= budget:
                return [trajectory.finish(status=Status.TRUNCATED)]
            trajectory.append_environment(addition)
            action = Action(Kind.INVALID)

    async def open(self) -> None:
        await self._searches.check()

    async def close(self) -> None:
        await self._searches.close()

    async def _reply(self, action: Action, trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens that the environment appends after an action other than an answer."""
        if action.kind is Kind.INVALID:
            trajectory.counts["invalid_actions"] += 1
            return encoded(tokenizer, INVALID)
        trajectory.counts["searches"] += 1
        found = without_tags(listing(await self._searches.search(action.content)))
        found = found[: CHARS_PER_TOKEN * self._max_information_tokens]
        # Special tokens in a document are split.
        read = encoded(tokenizer, found, split_special_tokens=True)[: self._max_information_tokens]
        return [*encoded(tokenizer, BEFORE), *read, *encoded(tokenizer, AFTER)]


def response_budget(episode: Episode) -> int:
    """Number of tokens that the response may have."""
    budget = episode.sampling.max_new_tokens
    if episode.max_context_len is not None:
        budget = min(budget, episode.max_context_len - len(episode.prompt.token_ids))
    return budget


def last_action(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Action:
    """The action of the model's last turn, finished or not."""
    return action_of(decode(tokenizer, trajectory.last_turn))


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool = False) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
    return tokens
