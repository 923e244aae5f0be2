"""One question, one answer; a reward of two weighted parts, and a metric."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    most: int = 5


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.most):
            data = SumData(prompt=f"{n}+{n}=", system_prompt="Add.", answer=str(n + n))
            yield SumTask(data, self.config.task)


__all__ = ["SumsTaskset"]
