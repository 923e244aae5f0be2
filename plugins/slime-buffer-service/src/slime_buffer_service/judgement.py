"""Checks of trajectories, with messages from which an agent's author can fix the agent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from slime_buffer_service.messages import Trajectory
from slime_buffer_service.prompt_queue import Lease
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.sample import Sample, Status, VersionSpan

FINISH = {"completed": FinishReason.STOP, "truncated": FinishReason.LENGTH}
UNKNOWN: Final = -1
"""Version of a ticket that this run did not give to an agent: older than any other."""


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """`code` is for programs: unknown_ticket, ticket_ended, invalid, too_long or stale."""

    code: str
    status: int
    text: str


def sample_of(pushed: Trajectory, ticket: Lease) -> Sample:
    """The sample of a trajectory. Raises Refused if it cannot be trained on."""
    length = len(pushed.token_ids)
    mask: list[int] = [1] * length if pushed.loss_mask is None else list(pushed.loss_mask)
    for name, found in (("log_probs", len(pushed.log_probs)), ("loss_mask", len(mask))):
        if found != length:
            raise invalid(f"{name} has {found} entries for {length} token_ids")
    if length > ticket.room:
        raise Refused(
            "too_long", 422, f"{length} tokens, but the ticket has room for {ticket.room} (its max_new_tokens)"
        )
    vocabulary = len(ticket.episode.tokenizer)
    if pushed.token_ids and (highest := max(pushed.token_ids)) >= vocabulary:
        raise invalid(f"token_ids: {highest} is not among the tokenizer's {vocabulary} tokens")
    for place, (bit, log_prob) in enumerate(zip(mask, pushed.log_probs, strict=True)):
        if log_prob and not bit:
            raise invalid(f"log_probs[{place}] is not 0, but loss_mask[{place}] is: no policy sampled that token")
    spans = spans_of(pushed, mask, ticket)
    accepted = ticket.episode.versions
    for version, _, _ in spans:
        if version > accepted[-1]:
            raise invalid(f"version {version} has not been trained yet: the policy's is {accepted[-1]}")
        if version < accepted[0]:
            raise Refused(
                "stale",
                409,
                f"version {version} is too old: tokens of versions {accepted[0]} to {accepted[-1]} are trained "
                "(--max-staleness). The ticket stays open: respond with the present policy",
            )
    return built(pushed, ticket, mask, spans)


def invalid(text: str) -> Refused:
    return Refused("invalid", 422, text)


def spans_of(pushed: Trajectory, mask: list[int], ticket: Lease) -> list[VersionSpan]:
    """The version spans of the tokens. They must cover all tokens with mask 1, in order and without overlap."""
    length = len(mask)
    if pushed.spans is None:
        version = ticket.versions.get(pushed.ticket, UNKNOWN) if pushed.version is None else pushed.version
        return [VersionSpan(version, 0, length)] if length else []
    if pushed.version is not None:
        raise invalid("version and spans are both set, and both name the policy of the tokens. Send one of them")
    spans = [VersionSpan(*span) for span in pushed.spans]
    for place, (_, start, end) in enumerate(spans):
        if not 0 <= start < end <= length:
            raise invalid(f"spans[{place}] is [{start}, {end}) of {length} tokens")
    for place, (before, after) in enumerate(pairwise(spans), start=1):
        if after.start < before.end:
            raise invalid(f"spans[{place}] begins at {after.start}, before the one ahead of it ends ({before.end})")
    covered = np.zeros(length, np.bool_)
    for _, start, end in spans:
        covered[start:end] = True
    missing = np.flatnonzero(np.array(mask, np.bool_) & ~covered)
    if len(missing):
        raise invalid(f"no span has the policy version of token {missing[0]}, which is to be trained")
    return spans


def built(pushed: Trajectory, ticket: Lease, mask: list[int], spans: list[VersionSpan]) -> Sample:
    """Builds the sample from consecutive runs of tokens with the same mask."""
    trajectory = ticket.episode.trajectory()
    tokens = np.array(pushed.token_ids, np.int32)
    log_probs = np.array(pushed.log_probs, np.float32)
    changes = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)] if mask else []
    for start, end in pairwise(changes):
        if not mask[start]:
            trajectory.append_environment(tokens[start:end])
            continue
        inside = tuple(
            VersionSpan(version, max(first, start) - start, min(last, end) - start)
            for version, first, last in spans
            if first < end and last > start
        )
        trajectory.append_completion(
            Completion(
                request_id=ticket.name,
                token_ids=tokens[start:end],
                log_probs=log_probs[start:end],
                finish_reason=FINISH[pushed.status],
                spans=inside,
            )
        )
    trajectory.counts.update(pushed.counts)
    return trajectory.finish(status=Status(pushed.status), reward=pushed.reward, metadata=dict(pushed.metadata))
