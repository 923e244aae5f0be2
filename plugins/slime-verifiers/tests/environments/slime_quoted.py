"""A taskset that names its task in quotes."""

import verifiers.v1 as vf


class QuotedTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace) -> float:
        return 1.0


class QuotedTaskset(vf.Taskset["QuotedTask", vf.TasksetConfig]):
    def load(self):
        yield QuotedTask(vf.TaskData(prompt="4+4="), self.config.task)


__all__ = ["QuotedTaskset"]
