"""Generators and collectors with one thing wrong."""

import asyncio
import os
from dataclasses import replace

import numpy as np

from acme_faults.rollouts import driver_of
from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.errors import EngineError, RolloutError
from slime_core.types.sample import Status

FaultyGenerator = driver_of(GeneratorDriver, Generator, "generate")
FaultyCollector = driver_of(CollectorDriver, Collector, "collect")


async def one_turn(episode, *, more=0, edit=None):
    trajectory = episode.trajectory()
    left = episode.sampling.max_new_tokens - trajectory.response_length
    if left <= 0:
        return trajectory.finish(status=Status.TRUNCATED)
    completion = await episode.complete(trajectory.tokens, replace(episode.sampling, max_new_tokens=left + more))
    trajectory.append_completion(completion if edit is None else edit(completion))
    return trajectory.finish()


class OneTurn(FaultyGenerator):
    """Nothing is wrong with it."""

    @staticmethod
    async def run(episode):
        return [await one_turn(episode)]


class ToolLogProbs(FaultyGenerator):
    """Gives a tool's token a log-prob."""

    @staticmethod
    async def run(episode):
        sample = await one_turn(episode)
        return [
            replace(
                sample,
                tokens=np.append(sample.tokens, np.int32(4)),
                loss_mask=np.append(sample.loss_mask, np.uint8(0)),
                rollout_log_probs=np.append(sample.rollout_log_probs, np.float32(-1)),
            )
        ]


class Invents(FaultyGenerator):
    """Improves on the engine's log-probs."""

    @staticmethod
    async def run(episode):
        return [await one_turn(episode, edit=lambda done: replace(done, log_probs=done.log_probs + np.float32(0.01)))]


class Overdraws(FaultyGenerator):
    """Asks for two tokens more than it may."""

    @staticmethod
    async def run(episode):
        return [await one_turn(episode, more=2)]


class HidesAborts(FaultyGenerator):
    """Returns aborted samples as completed."""

    @staticmethod
    async def run(episode):
        sample = await one_turn(episode)
        return [replace(sample, status=Status.COMPLETED) if sample.status is Status.ABORTED else sample]


class SwallowsErrors(FaultyGenerator):
    """Continues without an engine."""

    @staticmethod
    async def run(episode):
        try:
            return [await one_turn(episode)]
        except EngineError:
            return [episode.trajectory().finish(status=Status.TRUNCATED)]


class MixesEpisodes(FaultyGenerator):
    """Keeps the episode where the next one puts its own."""

    latest = None

    @classmethod
    async def run(cls, episode):
        cls.latest = episode
        await asyncio.sleep(0)
        return [await one_turn(cls.latest)]


class ChangesItsMind(FaultyGenerator):
    """Samples otherwise the second time."""

    @staticmethod
    async def run(episode):
        retried = ".1/" in episode._id
        return [await one_turn(episode, more=-3 if retried else 0)]


class StartsAnew(FaultyGenerator):
    """Throws away what was kept."""

    @staticmethod
    async def run(episode):
        episode.kept = None
        return [await one_turn(episode)]


class NeedsRoom(FaultyGenerator):
    """Returns nothing where there is no room for a response."""

    @staticmethod
    async def run(episode):
        sample = await one_turn(episode)
        return [] if sample.status is Status.TRUNCATED and not sample.response_length else [sample]


async def accepted(step, context):
    from slime_sources.accepted import AcceptedGroups

    return await AcceptedGroups().collect(step, context)


class Collects(FaultyCollector):
    """Nothing is wrong with it."""

    @staticmethod
    async def run(step, context):
        return await accepted(step, context)


class LastFirst(FaultyCollector):
    """Returns the groups in reverse, to its observer too."""

    @staticmethod
    async def run(step, context):
        seen = []
        groups = await accepted(step, replace(context, observe=lambda *seen_now: seen.append(seen_now)))
        for seen_step, seen_groups, refused in seen:
            context.observe(seen_step, seen_groups[::-1], refused)
        return groups[::-1]


class Rerolls(FaultyCollector):
    """Writes other tokens each time."""

    @staticmethod
    async def run(step, context):
        groups = await accepted(step, context)
        noise = np.frombuffer(os.urandom(4), np.int32)
        return [
            replace(g, samples=tuple(replace(s, tokens=np.append(s.tokens, noise)) for s in g.samples)) for g in groups
        ]


class SkipsItsObserver(FaultyCollector):
    """Does not call its observer."""

    @staticmethod
    async def run(step, context):
        return await accepted(step, replace(context, observe=lambda *given: None))


class LosesPrompts(FaultyCollector):
    """Draws one more, and drops it."""

    @staticmethod
    async def run(step, context):
        groups = await accepted(step, context)
        context.buffer.get_samples(1)
        return groups


class IgnoresFilters(FaultyCollector):
    """Takes every group."""

    @staticmethod
    async def run(step, context):
        return await accepted(step, replace(context, filters=()))


class MakesDo(FaultyCollector):
    """Takes the end of the data for a short step."""

    @staticmethod
    async def run(step, context):
        try:
            return await accepted(step, context)
        except RolloutError:
            return []
