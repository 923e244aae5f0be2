"""TrainingSession: a running run that a loop of one's own drives, with calls that block."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slime_session.adapter import Adapter, Snapshot
from slime_session.datum import Datum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_core.config.bound import BoundRun
    from slime_core.controller.learner import LearnerBatch
    from slime_core.types.batch import Float32, TokenColumns
    from slime_core.types.completion import Completion, SamplingParams
    from slime_core.types.report import EvalReport, TrainReport, WeightUpdateReport
    from slime_core.types.sample import Sample, SampleGroup
    from slime_core.workers.recorded_objective import Gradients
    from slime_session.adapter_loop import AdapterLoop
    from slime_session.engine_adapters import EngineAdapters
    from slime_session.live_run import LiveRun
    from slime_session.loss_choice import Loss
    from slime_session.own_loop import OwnLoop, PromptLike
    from slime_session.reports import OptimizerStepReport
    from slime_session.trainer_states import TrainerStates
    from slime_training.adapters.engine import PromptLogProbs

T = TypeVar("T")


class TrainingSession:
    """Made by `open_session`. The usual order, once for each rollout step:

        groups = session.score(session.sample())      # or session.collect(), which filters too
        batch = session.credit(groups)
        session.forward_backward(batch)
        session.optim_step()
        session.update_weights()

    A rollout step ends with the next of `collect`, `sample`, `credit`, `update_weights`, `evaluate`, `save`, `export` or
    `close` after an optimizer step: then `version` rises by one, observers get `step_trained`, and trackers its metrics.

    Calls wait for each other, from whatever thread. Errors are those of `slime run`, a `SlimeError` for what a user can fix.
    After an error or interrupt inside `forward_backward`, `optim_step` or `train` the trainers' state is unknown: the session
    refuses to train or save, and opened again it continues from the last checkpoint. Nothing is saved unless `save` is called.
    """

    def __init__(
        self, live: LiveRun, loop: OwnLoop, states: TrainerStates, adapters: AdapterLoop, engines: EngineAdapters
    ) -> None:
        self._live = live
        self._loop = loop
        self._states = states
        self._adapters = adapters
        self._engines = engines
        self._session = loop.session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def run(self) -> BoundRun:
        """The run file with its overrides and plugins; `run.config` has the keys."""
        return self._session.run

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self._session.folder.path

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._session.tokenizer

    @property
    def step(self) -> int:
        """Rollout steps that have ended, over all attempts."""
        return self._session.state.rollout_id

    @property
    def version(self) -> int:
        """Policy version, which rises with each rollout step."""
        return self._session.state.version

    @property
    def last_report(self) -> TrainReport | None:
        """Of the last rollout step that this session has ended."""
        return self._session.last_train

    def collect(self) -> list[SampleGroup]:
        """The next `rollout_batch_size` accepted groups, as `slime run` collects them: with rewards, filters and the
        collector of the run file, and with further steps started ahead (`rollout.max_async_level`). Raises RolloutsExhausted
        after `train.num_rollout` steps, and RolloutError."""
        return self._keeping_gradients("collect", self._loop.collect)

    def sample(
        self,
        prompts: int | Sequence[PromptLike] | None = None,
        *,
        n_samples: int | None = None,
        snapshot: Snapshot | None = None,
    ) -> list[SampleGroup]:
        """Generates `n_samples` responses to each prompt (default: `rollout.n_samples_per_prompt`), with no reward yet and no
        filter. prompts: how many to draw from the run's data, by default `rollout.rollout_batch_size`; or prompts of your own,
        as text or messages. snapshot: whose weights sample; None: those that `update_weights` sent last, also between
        `forward_backward` and `optim_step`. A response that could not be generated has the status FAILED and is not trained.
        Raises RolloutsExhausted if the data has ended."""
        client = None if snapshot is None else self._engines.with_snapshot(snapshot.held)
        if client is not None:
            self._live.do(client.prepare)
        return self._keeping_gradients("sample", lambda: self._loop.sample(prompts, n_samples, client))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        snapshot: Snapshot | None = None,
    ) -> list[Completion]:
        """A completion of each prompt, which is a list of token ids; its random draws depend on its seed alone. snapshot: whose
        weights sample; None: those that `update_weights` sent last, with adapters the base.

        It runs beside all other calls, of which it waits for none: also between `forward_backward` and `optim_step`, and from
        several threads at once. Where trainers and engines take turns on the same devices it waits for other calls, and the
        other way round. Raises EngineRefused for what the engine does not support."""
        future = self.start_generating(prompts, sampling, seeds=seeds, snapshot=snapshot)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start_generating(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        snapshot: Snapshot | None = None,
    ) -> Future[list[Completion]]:
        """`generate` that does not wait for its end. To cancel the future aborts its requests."""
        held = None if snapshot is None else snapshot.held
        return self._beside(lambda: self._engines.generate(prompts, sampling, seeds, held))

    def prompt_log_probs(
        self, prompts: Sequence[Sequence[int]], *, top_k: int = 0, snapshot: Snapshot | None = None
    ) -> list[PromptLogProbs]:
        """For each prompt of T token ids: `log_probs` float32 (T - 1,) of its tokens but the first, in nats at temperature 1,
        and with `top_k` the likeliest tokens in their places. It runs beside other calls, as `generate` does."""
        held = None if snapshot is None else snapshot.held
        return self._beside(lambda: self._engines.prompt_log_probs(prompts, top_k, held)).result()

    def _beside(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        colocation = self._session.colocation
        if not colocation.offloads:
            return self._live.begin(work)

        async def in_rollout() -> T:
            self._adapters.require_no_gradients_lost("generate")
            await colocation.rollout()
            return await work()

        return self._live.begin(in_rollout, in_turn=True)

    def _keeping_gradients(self, call: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._live.do(lambda: self._adapters.keeping_gradients(call, work))

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Those that the trainers hold, by name."""
        return {name: Adapter(self._live, self._adapters, state) for name, state in self._adapters.held.items()}

    def add_adapter(
        self,
        name: str,
        *,
        rank: int,
        alpha: float | None = None,
        seed: int = 0,
        attention: bool = True,
        mlp: bool = True,
        unembedding: bool = True,
    ) -> Adapter:
        """A new LoRA adapter over the run's weights, which are frozen (`backend.max_adapters`): A uniform by `seed`, B = 0, so
        that it changes nothing yet. alpha: it is scaled by alpha / rank; None: 32. attention, mlp, unembedding: the linear
        layers that it adapts. Raises ConfigError for a name in use, one too many, or a backend that holds none, and ModelError
        for layers that the model does not have."""
        from slime_training.adapters.shape import DEFAULT_ALPHA, AdapterShape

        shape = AdapterShape(
            rank=rank,
            alpha=DEFAULT_ALPHA if alpha is None else alpha,
            attention=attention,
            mlp=mlp,
            unembedding=unembedding,
        )
        return Adapter(self._live, self._adapters, self._live.do(lambda: self._adapters.add(name, shape, seed)))

    def load_adapter(self, name: str, folder: str | Path, *, optimizer: bool = False) -> Adapter:
        """An adapter that `Adapter.save` wrote, or peft. optimizer: with its optimizer state and step count; without, it begins
        at step 0. Raises ModelError for a folder that does not fit the model, CheckpointError if it has no optimizer state."""
        path = Path(folder).absolute()
        state = self._live.do(lambda: self._adapters.load(name, path, optimizer))
        return Adapter(self._live, self._adapters, state)

    def load_snapshot(self, folder: str | Path) -> Snapshot:
        """The weights that `Adapter.save` wrote, for sampling alone: no trainer holds them."""
        path = Path(folder).absolute()
        held = self._live.do(lambda: self._adapters.load_snapshot(path))
        return Snapshot(self._live, self._adapters, held)

    def score(
        self, groups: Sequence[SampleGroup], reward: Callable[[Sample], float] | None = None
    ) -> list[SampleGroup]:
        """The groups with rewards of samples that have none: the run's (`reward` in the run file), or those that a function
        gives, which is called in this thread and whose errors pass unchanged. Groups are frozen: use what is returned."""
        if reward is not None:
            from slime_session.own_loop import scored_by

            return scored_by(groups, reward)
        return self._live.do(lambda: self._loop.score(groups))

    def credit(self, groups: Sequence[SampleGroup], columns: TokenColumns | None = None) -> LearnerBatch:
        """Old and reference log-probs, values, advantages, corrections and loss weights, as the recipe asks for them.
        At most `rollout_batch_size` x `n_samples_per_prompt` rollouts; every `global_batch_size` of them are an optimizer
        step (`LearnerBatch.num_steps`), and the last one may have fewer.

        columns: float32 (M,) columns over all response tokens, in the order of the groups, to train with instead; nothing is
        computed then but loss weights that they lack. `LearnerBatch.batch` and `.columns` can be read, not written."""
        return self._live.do(lambda: self._loop.credit(groups, columns))

    def batch(self, datums: Sequence[Datum]) -> LearnerBatch:
        """A batch of given tokens with given advantages or weights, for `forward_backward` and `forward`. Limits as for
        `credit`. Raises DataError for lengths that do not fit."""
        return self._live.do(lambda: self._loop.batch(datums))

    def forward(self, batch: LearnerBatch) -> Float32:
        """(M,) log-probs in nats of the batch's response tokens under the trainers' weights, at the run's temperature, without
        gradient. The rows of sample n begin at `LearnerBatch.batch.response_offsets[n]`."""
        return self._live.do(lambda: self._loop.forward(batch))

    def train(self, batch: LearnerBatch) -> TrainReport:
        """All optimizer steps of the batch for every role, and the end of the rollout step: the second half of a step of
        `slime run`."""
        return self._live.do(lambda: self._loop.train(batch))

    def forward_backward(self, batch: LearnerBatch, *, step: int | None = None, loss: Loss | None = None) -> Gradients:
        """Adds the gradients of one optimizer step of the batch, which `step` names if it has several, to those since the last
        `optim_step`. The gradient is of the sum over tokens of loss weight x loss: of two batches, the sum of both. Returns the
        policy's loss, which is that sum in this call, and the log-probs of its forward, float32 (M,) as `forward` gives them.

        loss: another one than the recipe's, by its name in `slime.losses` or as a table of name and options, for the policy
        alone and without the recipe's KL, entropy and corrections. Raises ConfigError if the batch lacks a column that it
        reads, and TrainingError for a micro-batch that does not fit into memory."""
        return self._live.do(lambda: self._loop.forward_backward(batch, step, loss))

    def optim_step(
        self,
        lr: float | None = None,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip: float | None = None,
    ) -> OptimizerStepReport:
        """Clips the gradients and takes an optimizer step. lr: the policy's learning rate in this step; None: the schedule's
        (`train.lr`, `lr_decay_style`). betas, eps, weight_decay, and grad_clip, the norm that gradients are cut to (0: never):
        the policy's in this step alone; None: the run's (`train`). Raises TrainingError without gradients, ConfigError for a
        setting that backend or optimizer take from the run file only, and NonfiniteWeights."""
        from slime_session.step_settings import step_settings

        settings = step_settings(self.run, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip)
        return self._live.do(lambda: self._loop.optim_step(settings))

    def update_weights(self) -> WeightUpdateReport | None:
        """Sends the trainers' weights to the engines; None: the run has none. After an error or interrupt inside, calls that
        sample raise TrainingError until it is called again, since engines are paused."""
        return self._keeping_gradients("update_weights", self._loop.update_weights)

    def save_weights(self, folder: str | Path) -> Path:
        """Writes the trainers' weights for `load_weights`, and returns the folder; an earlier one is replaced. Raises
        StorageError."""
        path = Path(folder).absolute()
        return self._live.do(lambda: self._states.save_weights(path))

    def load_weights(self, folder: str | Path) -> None:
        """Sends the weights that `save_weights` wrote to the engines, which sample with them until the next `load_weights` or
        `update_weights`. The trainers' weights and gradients stay; `version` rises by one. Raises CheckpointError."""
        path = Path(folder).absolute()
        self._live.do(lambda: self._states.load_weights(path))

    def save_state(self, folder: str | Path) -> Path:
        """Writes weights, optimizer state and step count of the trainers, as the backend's checkpoints have them, and returns
        the folder; an earlier one is replaced. Nothing else of the run is in it. Raises TrainingError between
        `forward_backward` and `optim_step`, and StorageError."""
        path = Path(folder).absolute()
        return self._live.do(lambda: self._states.save_state(path))

    def load_state(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """The trainers continue from what `save_state` wrote; without `optimizer` with its weights alone and a new optimizer.
        Gradients are dropped, the engines keep their weights. It may follow an error inside `forward_backward` or
        `optim_step`. Raises CheckpointError, and ConfigError for a backend whose trainers cannot begin again."""
        path = Path(folder).absolute()
        self._live.do(lambda: self._states.load_state(path, optimizer))

    def restart(self) -> None:
        """The trainers begin again with the weights of the run's model folder and a new optimizer, as `load_state` does."""
        self._live.do(self._states.restart)

    def evaluate(self) -> EvalReport:
        """Evaluates all sets of the run file with the weights that the engines have."""
        return self._keeping_gradients("evaluate", self._loop.evaluate)

    def save(self) -> Path:
        """Writes a checkpoint and returns its folder; this session, opened again, and `slime run --resume` continue from it."""
        return self._live.do(self._loop.save)

    def export(self) -> Path:
        """Writes the policy as a Hugging Face folder, `hf/` in the run's folder, and returns it."""
        return self._live.do(self._loop.export)

    def close(self, error: BaseException | None = None) -> None:
        """Stops trainers, engines and rewards; a second call does nothing. error: why, for observers."""
        if self._live.is_closed:
            return
        try:
            self._live.do(self._end)
        except BaseException as raised:
            self._live.close(error or raised)
            if error is None:
                raise
        else:
            self._live.close(error)

    async def _end(self) -> None:
        await self._loop.close()
        await self._engines.close()
