"""A taskset whose tasks have no reward."""

import verifiers.v1 as vf


class UnrewardedTask(vf.Task[vf.TaskData]):
    pass


class UnrewardedTaskset(vf.Taskset[UnrewardedTask, vf.TasksetConfig]):
    def load(self):
        yield UnrewardedTask(vf.TaskData(prompt="4+4="), self.config.task)


__all__ = ["UnrewardedTaskset"]
