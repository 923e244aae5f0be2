"""A tool behind a server of the library, which is a process of its own."""

import verifiers.v1 as vf


class Counter(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def letters(self, word: str) -> str:
        """How many letters a word has."""
        return str(len(word))


class ToolConfig(vf.TaskConfig):
    counter: vf.ToolsetConfig = vf.ToolsetConfig()


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData, vf.State, ToolConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(config.counter)]

    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class ToolTasksetConfig(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()


class ToolTaskset(vf.Taskset[ToolTask, ToolTasksetConfig]):
    def load(self):
        yield ToolTask(ToolData(prompt="How long is slime?", answer="5"), self.config.task)


__all__ = ["ToolTaskset"]

if __name__ == "__main__":
    Counter.run()
