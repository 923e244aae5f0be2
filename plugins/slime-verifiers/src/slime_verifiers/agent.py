"""EnvironmentAgent: one episode of an environment for each response. Its agents are threads of calls to the engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields

from slime_agents.served.agents import Agent, AgentFailed, AgentTask, Earned
from slime_core.errors import ConfigError, DataError, PluginError
from slime_verifiers.config import VerifiersConfig
from slime_verifiers.library import check_type_parameters, failure, load_environment
from slime_verifiers.source import TASK

HARNESS = "slime_verifiers"


class EnvironmentAgent(Agent):
    """Each trace of an episode is a thread with its own rewards. Traces of agents that are not trained are left out."""

    scores_itself = True

    def __init__(self, config: VerifiersConfig) -> None:
        self._env = environment(config)
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ending = asyncio.Event()

    async def run(self, task: AgentTask) -> Mapping[str, Earned]:
        env = await self._served()
        client = vf.EvalClientConfig(base_url=task.base_url, api_key_var="SLIME_NO_KEY")
        context = vf.ModelContext(model=task.model, client=client)
        (slot,) = env.slots(task_of(env, task))
        episode = await env.run_slot(slot, context, on_trace=lambda trace: task.name_thread(trace.id))
        if not env.complete(episode):
            # Errors of failed attempts are kept even if a later attempt succeeded.
            errors = [*(error for trace in episode.traces if not trace.ok for error in trace.errors), *episode.errors]
            if errors:
                raise AgentFailed(f"{episode.env.id}: {errors[-1].type}: {errors[-1].message}")
        names = sorted({trace.agent.name for trace in episode.traces if trace.agent.trainable})
        return {trace.id: earned(trace, names) for trace in episode.traces if not trace.errors or trace.ok}

    async def close(self) -> None:
        self._ending.set()
        if self._serving is not None:
            await self._serving

    async def _served(self) -> vf.Env[Any]:
        async with self._starting:
            if self._serving is None:
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._serving = asyncio.create_task(self._serve(self._env, ready))
                await ready
        return self._env

    async def _serve(self, env: vf.Env[Any], ready: asyncio.Future[None]) -> None:
        """Starts and ends the servers in one task, as the library's tool servers require."""
        try:
            async with env.serving():
                ready.set_result(None)
                await self._ending.wait()
        except Exception as error:
            if ready.done():
                raise
            failure = PluginError(
                f"{env.config.env_id}: {type(error).__name__} while its servers were started: {error}"
            )
            failure.__cause__ = error
            ready.set_exception(failure)


def environment(config: VerifiersConfig) -> vf.Env[Any]:
    """Loads the environment. Agents run in this process unless their table sets something else: the library's default is a
    shell on a rented machine."""
    settings = load_environment(config.env, config.folder)
    own = vf.default_harness_id(settings.taskset.id)
    changes: dict[str, Any] = {}
    for name, agent in agent_config_fields(settings).items():
        table = config.env.get(name)
        if isinstance(table, Mapping) and table.get("sampling"):
            raise ConfigError(
                f"generate.env.{name}.sampling: agents are sampled as the run is (rollout_temperature, rollout_top_p, "
                "rollout_max_response_len). Remove it."
            )
        given: dict[str, Any] = {}
        if agent.harness is None and own == vf.default_harness_id(""):
            given["harness"] = vf.harness_config_type(HARNESS)(id=HARNESS)
        if "runtime" not in agent.model_fields_set:
            given["runtime"] = vf.SubprocessConfig()
        if agent.max_turns is None:
            given["max_turns"] = config.max_turns
        changes[name] = agent.model_copy(update=given)
    asked = f'generate.env.taskset = "{settings.taskset.id}"'
    try:
        env = vf.load_environment(settings.model_copy(update=changes))
    except Exception as error:
        raise failure(asked, error) from error
    check_type_parameters(asked, type(env), type(env.taskset), type(env.taskset).task_type())
    return env


def task_of(env: vf.Env[Any], task: AgentTask) -> vf.Task[Any, Any, Any]:
    """The task that the prompt was made from; for a prompt of another source, a task with its messages and metadata."""
    kind = type(env.taskset).task_type()
    data = task.metadata.get(TASK)
    if data is None:
        data = {"prompt": list(task.messages) if task.messages else task.prompt, **task.metadata}
    elif (of := task.metadata.get("taskset")) != env.config.taskset.id:
        raise PluginError(
            f'data.taskset.id = "{of}" and generate.env.taskset.id = "{env.config.taskset.id}": an environment accepts '
            "only its own tasks. Set both to the same."
        )
    try:
        return kind(kind.data_type().model_validate(data), env.config.taskset.task)
    except ValidationError as error:
        raise DataError(f"this prompt is no task of {env.config.taskset.id}: {error}") from error


def earned(trace: vf.Trace[Any, Any, Any], names: list[str]) -> Earned:
    reward = trace.reward
    if not math.isfinite(reward):
        raise AgentFailed(f"the environment returned the reward {reward}")
    if trace.agent.trainable and not trace.rewards:
        raise AgentFailed(
            f"agent {trace.agent.name} has no reward: its task has no method with @vf.reward and no judge, and the environment "
            "recorded none"
        )
    parts = {name: part.score for name, part in trace.rewards.items() if part is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    agent = trace.agent.name
    return Earned(
        reward=reward,
        parts=parts,
        agent=agent,
        number=names.index(agent) if agent in names else 0,
        num_agents=max(1, len(names)),
        is_trained=trace.agent.trainable,
        is_cut=trace.is_truncated or trace.is_timeout,
    )
