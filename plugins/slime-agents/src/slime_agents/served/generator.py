"""The generator around an agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slime_agents.config import AgentConfig
from slime_agents.control_tokens import ControlTokens
from slime_agents.served.agents import Agent, AgentFailed, AgentTask, Earned
from slime_agents.served.server import AgentServer
from slime_agents.served.session import Session
from slime_core.contracts.generator import Episode, Generator
from slime_core.errors import PluginError
from slime_core.types.sample import Sample, Status


class ServedAgent(Generator):
    """Runs the agent once for each response. Its samples share the rollout id and one reward: what the agent returned, or else
    the reward of its last sample. In an evaluation only the last sample is returned."""

    def __init__(self, agent: Agent, config: AgentConfig) -> None:
        self._agent = agent
        self._config = config
        self._server = AgentServer()
        self._control: ControlTokens | None = None

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        if not episode.tokenizer.chat_template:
            raise PluginError(
                "agents send messages, and the model's tokenizer has no chat template: add chat_template.jinja to its folder"
            )
        if self._control is None:
            self._control = ControlTokens(episode.tokenizer)
        session = Session(
            episode,
            self._control,
            max_calls=self._config.max_calls,
            fork_threshold=self._config.fork_threshold,
            template_kwargs=self._config.chat_template_kwargs,
            ignored_parameters=self._config.ignored_parameters,
        )
        key = await self._server.open(session)
        try:
            earned, is_late = await self._run(episode, session, key)
        finally:
            self._server.drop(key)
        if session.failure is not None:
            raise session.failure
        by_thread = earned if isinstance(earned, Mapping) else {}
        is_ended = is_late or session.is_used_up
        threads = session.samples(is_cut=lambda name: is_ended or (name in by_thread and by_thread[name].is_cut))
        samples = [sample for _, sample in threads]
        if session.is_aborted:
            return samples or [episode.trajectory().finish(status=Status.ABORTED)]
        if self._agent.scores_itself and is_ended:
            limit = f"within {self._config.timeout_s:g} s" if is_late else f"with {self._config.max_calls} calls"
            raise AgentFailed(f"it had not ended {limit}, and has no reward")
        if not samples:
            raise AgentFailed(
                f"the agent has not called the model{f' within {self._config.timeout_s:g} s' if is_late else ''}"
            )
        if isinstance(earned, Mapping):
            scored = [(earned[thread], sample) for thread, sample in threads if thread in earned]
            paid = [with_reward(sample, by) for by, sample in scored if by.is_trained]
            if not paid:
                raise AgentFailed("no agent that is to be trained has called the model")
            return paid[-1:] if episode.evaluation else paid
        if earned is not None:
            return [replace(sample, reward=reward_of(earned)) for sample in samples]
        if episode.evaluation or len(samples) == 1:
            return samples[-1:]
        (outcome,) = await episode.score(samples[-1:])
        rest = [replace(sample, reward=outcome.reward) for sample in samples[:-1]]
        return [*rest, outcome]

    async def open(self) -> None:
        await self._agent.open()

    async def close(self) -> None:
        await self._agent.close()
        await self._server.close()

    async def _run(
        self, episode: Episode, session: Session, key: str
    ) -> tuple[float | Mapping[str, Earned] | None, bool]:
        """Returns the agent's result, and whether it was ended because of `timeout_s`."""
        prompt = episode.prompt
        task = AgentTask(
            prompt=prompt.text,
            messages=prompt.messages,
            metadata=prompt.metadata,
            evaluation=episode.evaluation,
            base_url=f"{self._server.url}/v1",
            anthropic_url=self._server.url,
            api_key=key,
            name_thread=functools.partial(self._server.name_thread, key),
        )
        running = asyncio.create_task(self._agent.run(task))
        ends = [asyncio.create_task(session.ended.wait()), asyncio.create_task(self._stopped(episode, session))]
        try:
            await asyncio.wait([running, *ends], timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if session.ended.is_set():
                return None, False
            if not running.done():
                running.cancel()
                await asyncio.wait([running])
                if self._agent.stuck is not None:
                    raise self._agent.stuck
                return None, True
            error = running.exception()
            if error is None:
                return running.result(), False
            if session.is_used_up and isinstance(error, Exception):
                # It got the error that no more responses are served.
                return None, False
            raise error
        finally:
            for task_of in (running, *ends):
                task_of.cancel()
            with contextlib.suppress(Exception):
                await asyncio.gather(running, *ends, return_exceptions=True)

    async def _stopped(self, episode: Episode, session: Session) -> None:
        await episode.stopped()
        session.is_aborted = True
        session.ended.set()


def reward_of(returned: object) -> float:
    """AgentFailed if it is no finite number."""
    if not isinstance(returned, numbers.Real) or not math.isfinite(returned):
        raise AgentFailed(
            f"the agent returned {returned!r:.80}: it must return a finite number, or None for the run's reward"
        )
    return float(returned)


def with_reward(sample: Sample, earned: Earned) -> Sample:
    sample = replace(sample, reward=reward_of(earned.reward), reward_parts=dict(earned.parts))
    if earned.num_agents == 1:
        return sample
    # Negative, so that it differs from every group index.
    key = -1 - (sample.group_index * earned.num_agents + earned.number)
    return replace(sample, credit_key=key, metadata={**sample.metadata, "agent": earned.agent})
