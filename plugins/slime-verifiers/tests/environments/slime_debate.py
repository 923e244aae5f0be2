"""Two who answer the same question, and a judge, who is not trained, calls as well."""

import verifiers.v1 as vf


class DebateTask(vf.Task[vf.TaskData]):
    pass


class DebateTaskset(vf.Taskset[DebateTask, vf.TasksetConfig]):
    def load(self):
        yield DebateTask(vf.TaskData(prompt="Why?"), self.config.task)


class DebateConfig(vf.EnvConfig):
    pro: vf.AgentConfig = vf.AgentConfig()
    con: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        await agents.pro.run(task)
        await agents.con.run(task)
        await agents.judge.run(task.with_data(prompt="Who is right?"))

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("judged", {"pro": 1.0, "con": -1.0, "judge": 0.0}[trace.agent.name])


__all__ = ["DebateEnv", "DebateTaskset"]
