"""A run whose engines and trainers only take time: the loop, the session, the collector, the buffer, the client and the
checkpoints are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np

from slime_core.config.run import RunConfig
from slime_core.contracts.filter import BufferFilter, GroupFilter
from slime_core.contracts.generator import Generator
from slime_core.contracts.hookspecs import Run
from slime_core.contracts.source import DataSource
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import EvalTask, Evaluator
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.saving import read_ahead
from slime_core.controller.session import Session
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.registry import Registry
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.groups import GroupRunner, GroupSettings
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.completion import SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.report import TrainReport, WeightUpdateReport
from slime_core.types.sample import SampleGroup
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices
from slime_plugin_kit.scripted_engine import EngineInLoop
from slime_plugin_kit.timed_engine import TimedEngine
from slime_sources.plugin import AcceptedDriver, PoolDriver

EVAL_SET: Final = "held_out"


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What is simulated, and what came of it."""

    engines: Sequence[TimedEngine]
    folder: Path
    num_rollout: int
    rollout: Mapping[str, Any]
    """The rollout table."""
    train_s: float
    update_weights_s: float = 0.0
    save_interval: int | None = None
    async_save: bool = False
    ranks: IdleRanks = field(default_factory=lambda: IdleRanks())
    """The trained role."""
    update_weights_interval: int = 1
    filters: Sequence[GroupFilter] = ()
    buffer_filter: BufferFilter = field(default_factory=PopFirstFilter)
    concurrency: int = 10**9
    eval_prompts: int = 0
    """Prompts of an evaluation set, which is run after every second step."""
    eval: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the eval table."""
    observe: Callable[[int, Sequence[SampleGroup]], None] | None = None
    """Is given what would else be kept in `trained`: that grows with the steps."""
    trained: list[tuple[int, list[SampleGroup]]] = field(default_factory=list)
    """(version, groups) of each step, as the trainer got them."""
    trained_at: list[float] = field(default_factory=list)
    """When each step's training began."""
    updated_versions: list[int] = field(default_factory=list)

    def session(self) -> Session:
        """A new one; it resumes from the newest checkpoint in the folder, as `slime run` does."""
        config = self._config()
        rollout = config.rollout
        driver = PoolDriver if rollout.in_flight or rollout.partial_rollout else AcceptedDriver
        staleness = rollout.max_async_level + config.sync.update_weights_interval - 1
        run = SimpleNamespace(
            config=config,
            evals=(SimpleNamespace(name=EVAL_SET),) if self.eval_prompts else (),
            collector=SimpleNamespace(driver=driver),
            generates=True,
            max_staleness=staleness if rollout.max_staleness is None else rollout.max_staleness,
        )
        store = CheckpointStore(self.folder / "checkpoints", keep=2)
        found = store.load()
        state = RunState() if found is None else found[0]
        client = EngineClient([EngineInLoop(engine) for engine in self.engines], concurrency=self.concurrency)
        session = Session(
            run=cast("Any", run),
            event=Run(name="simulated", run_dir=self.folder, config={}),
            folder=RunFolder(self.folder),
            num_rollout=self.num_rollout,
            tokenizer=cast("Any", NoText()),
            buffer=DataBuffer(Numbers(), self.buffer_filter),
            collector=driver.build(driver.Config()),
            runner=self._runner(client, config, "train"),
            filters=self.filters,
            client=client,
            served_engines=(),
            middlewares={},
            roles=cast("Any", {"actor": self.ranks}),
            colocation=ColocationManager(Devices(), client, shared=False, offload_rollout=False),
            learner=cast("Any", self),
            transport=cast("Any", self),
            evaluator=Evaluator(self._eval_tasks(client, config)),
            store=store,
            trackers=(),
            hooks=Hooks.load(Registry(()), own={}),
            state=state,
            kept_ahead=[],
            saved_rollout_id=state.rollout_id,
        )
        if found is not None:
            session.buffer.load(found[1] / "buffer")
            session.kept_ahead = read_ahead(found[1], state)
        return session

    def _config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "simulated",
                "model": {"hf_checkpoint": "none"},
                "backend": "none",
                "engine": "none",
                "algo": "none",
                "rollout": dict(self.rollout),
                "train": {"num_rollout": self.num_rollout},
                "checkpoint": {"save_interval": self.save_interval, "async_save": self.async_save},
                "sync": {"update_weights_interval": self.update_weights_interval},
                "eval": {"skip_eval_before_train": True, "eval_interval": 2, **self.eval},
            }
        )

    def _eval_tasks(self, client: EngineClient, config: RunConfig) -> list[EvalTask]:
        if not self.eval_prompts:
            return []
        settings = SimpleNamespace(name=EVAL_SET, metadata_overrides={}, pass_threshold=1.0)
        runner = self._runner(client, config, f"eval-{EVAL_SET}")
        return [EvalTask(settings=cast("Any", settings), prompts=Numbers().take(self.eval_prompts), runner=runner)]

    def _runner(self, client: EngineClient, config: RunConfig, scope: str) -> GroupRunner:
        rollout = config.rollout
        generator: Generator = SingleTurn()
        return GroupRunner(
            GroupSettings(
                scope=scope,
                num_samples=rollout.n_samples_per_prompt,
                sampling=SamplingParams(max_new_tokens=rollout.rollout_max_response_len),
                seed=config.rollout_seed,
                max_context_len=None,
                scoring=None,
                evaluation=scope != "train",
                max_retries=0,
                mask_offpolicy=rollout.mask_offpolicy_in_partial_rollout,
            ),
            generator=generator,
            client=client,
            tokenizer=cast("Any", NoText()),
            rewards=None,
            on_failure=lambda failure: None,
        )

    # What the session calls of a learner and of a transport.

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        self.trained_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.train_s)
        if self.observe is None:
            self.trained.append((version, list(groups)))
        else:
            self.observe(version, groups)
        return TrainReport(
            version=version + 1, steps=(), rollout={}, perf={"perf/train_tokens": 0.0, "perf/train_time": 1.0}
        )

    async def push(self, trainers: Any, engines: Any, version: int) -> WeightUpdateReport:
        await asyncio.sleep(self.update_weights_s)
        await engines.call_all("commit_weights", version)
        self.updated_versions.append(version)
        return WeightUpdateReport(version=version, seconds=self.update_weights_s, bytes_sent=0, buckets=0)


class IdleRanks:
    """Trained roles without anything to keep."""

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        return []

    async def save(self, folder: Path) -> None:
        (folder / "nothing").write_text("")

    async def stage(self, folder: Path) -> None:
        pass

    async def written(self) -> None:
        pass


class NoText:
    """A tokenizer that decodes to empty text."""

    is_fast = False

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return ""


class Numbers(DataSource):
    """Prompt after prompt, for ever."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        first, self._next = self._next, self._next + num_prompts
        return [
            Prompt(group_index=number, text="", token_ids=np.array([1], np.int32), origin=f"prompt {number}")
            for number in range(first, self._next)
        ]

    def state(self) -> Mapping[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    @property
    def num_rows(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        return "numbers"
