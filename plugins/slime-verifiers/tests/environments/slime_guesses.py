"""A user who is the environment itself answers each guess, so an episode has several turns."""

import asyncio

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace) -> float:
        return 1.0 / trace.num_turns if trace.last_reply == str(self.data.number) else 0.0


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in (3, 7):
            yield GuessTask(GuessData(number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            given = await player.turn("Guess.")
            while not given.terminated and given.last_reply != str(task.data.number):
                if given.last_reply == "!":
                    await asyncio.sleep(60)
                if given.last_reply == "?":
                    raise RuntimeError("the player does not know what a number is")
                given = await player.turn("more" if int(given.last_reply) < task.data.number else "less")


__all__ = ["GuessEnv", "GuessTaskset"]
