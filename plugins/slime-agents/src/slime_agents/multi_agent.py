"""multi_agent: the model in several roles, each of which reads what the earlier ones wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slime_agents.config import AgentRole, MultiAgentConfig
from slime_agents.control_tokens import ControlTokens
from slime_core.contracts.generator import Episode, Generator
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, Status
from slime_sources.rendering.chat_template import TEMPLATE_ERRORS, CountedRange, render_chat, shown


class MultiAgent(Generator):
    """Agents respond in the order given, `rounds` times. Each response of an agent is a sample with its own prompt; all samples
    of an episode are one rollout. An agent is compared only with itself: each has a credit key for every prompt.

    The samples of the last agent are the outcome. An evaluation returns only them.
    """

    def __init__(self, config: MultiAgentConfig) -> None:
        self._config = config
        self._control: ControlTokens | None = None
        # A partial rollout of one sample continues; of several samples the kernel keeps none.
        self._is_lone = config.rounds * sum(agent.count for agent in config.agents) == 1
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._templates: dict[str, Template] = {}
        for agent in config.agents:
            if agent.prompt is None:
                continue
            try:
                self._templates[agent.name] = environment.from_string(agent.prompt)
            except TemplateError as error:
                raise ConfigError(f"agents.{agent.name}.prompt: {error}") from error

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        if self._control is None:
            self._control = ControlTokens(episode.tokenizer)
        control = self._control
        answers: dict[str, list[str]] = {agent.name: [] for agent in self._config.agents}
        samples: list[Sample] = []
        spoken: list[Sample] = []
        for turn in range(self._config.rounds):
            for number, agent in enumerate(self._config.agents):
                prompt = self._prompt(episode, control, agent, answers, turn)
                spoken = await asyncio.gather(*(self._speak(episode, number, prompt) for _ in range(agent.count)))
                samples += spoken
                if any(sample.status is Status.ABORTED for sample in spoken):
                    return samples
                answers[agent.name] += [spoken_text(sample, control) for sample in spoken]
        if episode.evaluation:
            return spoken
        return await self._shared(episode, samples, num_last=len(spoken))

    async def _speak(self, episode: Episode, number: int, prompt: Prompt) -> Sample:
        agent = self._config.agents[number]
        budget = episode.sampling.max_new_tokens
        if agent.max_new_tokens is not None:
            budget = min(budget, agent.max_new_tokens)
        trajectory = episode.trajectory(prompt)
        if episode.kept is not None and self._is_lone:
            trajectory.restart_from(episode.kept)
        sampling = replace(episode.sampling, max_new_tokens=max(0, budget - trajectory.response_length))
        trajectory.append_completion(await episode.complete(trajectory.tokens, sampling))
        trajectory.counts[f"{agent.name}_tokens"] = trajectory.response_length
        sample = trajectory.finish(metadata={"agent": agent.name})
        # Negative, so that it differs from every group index.
        return replace(sample, credit_key=-1 - (prompt.group_index * len(self._config.agents) + number))

    async def _shared(self, episode: Episode, samples: Sequence[Sample], num_last: int) -> Sequence[Sample]:
        """Sets the rewards if those of any agent depend on the outcome; otherwise the run scores the samples."""
        shares = {agent.name: agent.outcome_share for agent in self._config.agents}
        if not any(shares.values()):
            return samples
        scored = await episode.score(samples)
        rewards = [sample.reward for sample in scored[-num_last:] if sample.reward is not None]
        if not rewards:
            return scored
        outcome = float(np.mean(rewards))
        return [shared(sample, shares[sample.metadata["agent"]], outcome) for sample in scored]

    def _prompt(
        self,
        episode: Episode,
        control: ControlTokens,
        agent: AgentRole,
        answers: Mapping[str, Sequence[str]],
        turn: int,
    ) -> Prompt:
        """The task unchanged, or the agent's template rendered with it and the responses so far."""
        task = episode.prompt
        if agent.prompt is None:
            return task
        seen: dict[str, Any] = {"prompt": task.text, "metadata": task.metadata, "answers": answers, "round": turn}
        if task.messages is not None:
            seen["prompt"] = task.messages[-1].get("content", "")
        try:
            text = self._templates[agent.name].render(seen, range=CountedRange())
        except TEMPLATE_ERRORS as error:
            raise PluginError(
                f"agents.{agent.name}.prompt on {task.origin}: {shown(error)}. It may use prompt, metadata, round, and "
                f"answers with {', '.join(answers)}."
            ) from error
        messages = None
        if task.messages is not None:
            messages = [{"role": "user", "content": control.plain_response(text)}]
            try:
                text = render_chat(episode.tokenizer, messages)
            except TEMPLATE_ERRORS as error:
                raise DataError(f"{task.origin}: the chat template failed: {shown(error)}") from error
            messages = [{"role": "user", "content": control.unmarked(messages[0]["content"])}]
        tokens = control.encode(text)
        if not len(tokens):
            raise PluginError(f"agents.{agent.name}.prompt on {task.origin}: the text has no tokens.")
        return replace(task, text=control.unmarked(text), token_ids=tokens, messages=messages, images=())


def shared(sample: Sample, share: float, outcome: float) -> Sample:
    """Sets the reward to the weighted mean of the sample's own reward and the outcome's."""
    if sample.reward is None:
        return sample
    return replace(
        sample,
        reward=(1 - share) * sample.reward + share * outcome,
        reward_parts={**sample.reward_parts, "own": sample.reward, "outcome": outcome},
    )


def spoken_text(sample: Sample, control: ControlTokens) -> str:
    """The text of a response that other agents read, without special tokens. Those that the model spelled out are marked, since
    they would be tokenized as special tokens."""
    return control.plain_response(sample.response)
