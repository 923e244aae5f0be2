"""retool: the model writes code blocks, which are run, and reads what they print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from slime_agents.config import RetoolConfig
from slime_agents.control_tokens import ControlTokens
from slime_agents.sandbox import Execution, Interpreter, Outcome
from slime_core.contracts.generator import Episode, Generator
from slime_core.types.completion import SamplingParams
from slime_core.types.sample import Sample, Status
from slime_core.types.trajectory import Trajectory, decode

CALLS: Final = "tool_calls"
FENCE: Final = re.compile(r"\A\s*```(?:python|py)?[^\S\n]*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class ToolFailed(Exception):
    """The sandbox itself failed, not the code of the response. The response is generated again, or counted as failed."""


class Retool(Generator):
    """The model's turn ends with a code block; what the block prints is appended between the interpreter's tags, which the
    model sees and is never trained on; then the model continues.

    The tokens of a response hold its whole state, so a partial rollout continues where it stopped.
    Source: ReTool, arXiv:2504.11536, section 3.
    """

    def __init__(self, config: RetoolConfig) -> None:
        self._config = config
        self._interpreter = Interpreter(config.sandbox)
        self._has_started = False
        self._control: ControlTokens | None = None

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        if self._config.tool and not self._has_started:
            # A missing wall ends the run at its first step.
            await self._interpreter.start()
            self._has_started = True
        trajectory = episode.trajectory()
        counts = trajectory.counts
        while True:
            asked = self._asked_code(episode, trajectory)
            if asked is not None:
                if counts[CALLS] == self._config.max_tool_calls:
                    return [finished(trajectory, Status.TRUNCATED)]
                execution = await self._interpreter.run(asked)
                if execution.outcome is Outcome.INFRA:
                    raise ToolFailed(execution.reason)
                counts.update([CALLS, f"tool_{execution.outcome}"])
                trajectory.append_environment(self._tool_output(episode, execution))
            room = episode.sampling.max_new_tokens - trajectory.response_length
            if room <= 0:
                return [finished(trajectory, Status.TRUNCATED)]
            trajectory.append_completion(await episode.complete(trajectory.tokens, self._sampling(episode, room)))
            if trajectory.status is not Status.COMPLETED or self._asked_code(episode, trajectory) is None:
                return [finished(trajectory, trajectory.status)]

    async def close(self) -> None:
        self._interpreter.close()

    def _sampling(self, episode: Episode, room: int) -> SamplingParams:
        stop = (*episode.sampling.stop, self._config.code_end) if self._config.tool else episode.sampling.stop
        return replace(episode.sampling, max_new_tokens=room, stop=stop)

    def _asked_code(self, episode: Episode, trajectory: Trajectory) -> str | None:
        """The code block at the end of the model's last turn, or None."""
        if not self._config.tool:
            return None
        written = decode(episode.tokenizer, trajectory.last_turn)
        before, ended, after = written.rpartition(self._config.code_end)
        if not ended or after.strip():
            return None
        _, begun, code = before.rpartition(self._config.code_begin)
        if not begun:
            return None
        fenced = FENCE.match(code)
        return fenced[1] if fenced else code

    def _tool_output(self, episode: Episode, execution: Execution) -> npt.NDArray[np.int32]:
        text = execution.out
        if execution.outcome is not Outcome.OK:
            text += execution.err.strip() if self._config.tracebacks and execution.err else execution.reason
        text = shortened(text.removesuffix("\n"), self._config.max_output_chars)
        if self._control is None:
            self._control = ControlTokens(episode.tokenizer)
        return self._control.between(self._config.output_begin, text, self._config.output_end)


def shortened(text: str, most: int) -> str:
    """Returns a text longer than `most` characters without its middle."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}...{text[len(text) - (most - head) :]}"


def finished(trajectory: Trajectory, status: Status) -> Sample:
    """Returns the sample, with the number of tool calls in its metadata, where rewards can read it."""
    return trajectory.finish(status=status, metadata={CALLS: trajectory.counts[CALLS]})
