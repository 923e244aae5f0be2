"""Training: requests that change or read a model. They are written down, run in the order of their seq_id, and after a restart
those that the model's saved state does not hold are run again.

A request has two halves: what the trainers do, in the model's turn, and its rest (files, results), while others have theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import (
    LoadWeightsRequest,
    OptimStepRequest,
)

from slime_core.errors import EngineError, SlimeError, StorageError, TrainingError
from slime_core.registry import Registry
from slime_core.registry.boundary import held
from slime_core.types.batch import Float32
from slime_tinker.checkpoints import Checkpoints
from slime_tinker.errors import RequestError, SkippedStep
from slime_tinker.futures import Futures, failure, json_outcome
from slime_tinker.holdings import Holdings
from slime_tinker.journal import Journal, Statement, body_dropped_of
from slime_tinker.loss_sum import loss_of
from slime_tinker.model_settings import adam_of
from slime_tinker.model_states import Live, ModelStates, StagedState
from slime_tinker.models import Models
from slime_tinker.notes import note
from slime_tinker.records import ModelRecord, Outcome, RequestRecord
from slime_tinker.request_halves import Done, Rest, rest_of
from slime_tinker.results import forward_backward_outcome
from slime_tinker.saving import Saving
from slime_tinker.settings import Settings
from slime_tinker.training_data import TrainingData, training_data
from slime_tinker.turns import Turns

T = TypeVar("T")


EFFECTLESS: Final = frozenset({"forward", "save_weights", "save_weights_for_sampler"})
"""Kinds that leave the model as it was; what they did is on the disk."""
SERVERS_FAULT: Final = (TrainingError, EngineError, StorageError)
NOT_RESTORED: Final = (
    "this model could not be restored after a restart; who runs the server has the reason. "
    "create_training_client_from_state continues a checkpoint."
)
DAMAGED: Final = failure(NOT_RESTORED, user=False)
UNLOADED: Final = failure("this model was unloaded.", user=True)
LATE: Final = failure("it came after later requests of its model had run.", user=True)
NOT_WRITTEN: Final = (
    "the server's disk could not be written, so that nothing was saved; the model is as it was. Try again, or delete "
    "checkpoints that are not needed."
)


@dataclass(slots=True)
class Training:
    models: Models
    holdings: Holdings
    journal: Journal
    futures: Futures
    turns: Turns
    checkpoints: Checkpoints
    states: ModelStates
    saving: Saving
    settings: Settings
    registry: Registry
    trainer: Executor
    """One thread, in which all calls of `models` are made."""
    tasks: asyncio.TaskGroup
    _live: dict[str, Live] = field(default_factory=dict)
    _damaged: set[str] = field(default_factory=set)
    """Models that could not be restored. They keep their place until they are unloaded, as the next start may restore them."""

    async def submit(self, record: RequestRecord, *beside: Statement) -> None:
        """Writes the request down and lets it run in its turn. A second one with the same id is the first."""
        if record.owner in self._damaged:
            raise RequestError(f"model_id {record.owner}: {NOT_RESTORED}", status=410)
        if record.owner not in self.turns:
            raise RequestError(
                f"model_id {record.owner}: this model was unloaded. create_training_client_from_state continues a checkpoint.",
                status=410,
            )
        if not await self.futures.accept(record, *beside):
            return
        # While it was written down, the model may have been unloaded or may have stopped waiting for it.
        if record.owner not in self.turns:
            gone = DAMAGED if record.owner in self._damaged else UNLOADED
            await self.futures.resolve(record.id, gone, [body_dropped_of(record.id)])
        elif self.turns.passed(record.owner, record.seq):
            await self.futures.resolve(record.id, LATE, [body_dropped_of(record.id)])
        else:
            self._add(record, effect=True, done=False)

    def open(self, model: str, tenant: str) -> None:
        """A model that its first request, with seq_id 0, creates."""
        self._live[model] = Live()
        self.turns.open(model, tenant, 0)

    def forget(self, model: str) -> None:
        """One that was opened, and whose first request could not be written down."""
        self.turns.close(model)
        self._live.pop(model, None)

    @property
    def num_live(self) -> int:
        return len(self._live.keys() | self._damaged)

    async def restore(self) -> None:
        """Everything that was in the trainers when the server ended."""
        for model in list(self.holdings.models.values()):
            if model.unloaded:
                continue
            if model.damaged:
                await self._without_state(model, "an error ended the server while its requests were repeated")
                continue
            live = Live(steps=model.steps)
            if model.state is not None:
                folder = self.checkpoints.folder_of(model.state)
                try:
                    await self._call(partial(self.models.load, model.id, model.spec, folder, optimizer=True))
                except SlimeError as error:
                    await self._without_state(model, f"its saved state cannot be loaded: {error}")
                    continue
                live.created, live.applied = True, model.applied
            self._live[model.id] = live
            first = live.applied + 1
            owned = "owner = ? and seq >= ? and "
            failed = {record.seq for record in await self.journal.requests(owned + "failed = 1", (model.id, first))}
            ran = await self.journal.requests(owned + "done is not null", (model.id, first))
            for record in ran:
                if record.kind == "load_weights" and record.seq not in failed:
                    self.checkpoints.need(model.id, LoadWeightsRequest.model_validate_json(record.body).path)
                    live.loaded = record.seq
            # Results come in order, but for those of failures.
            last = max((record.seq for record in ran if record.seq not in failed), default=live.applied)
            self.turns.open(model.id, model.tenant, first, ran_through=last)
            # They fail again, and drop the same gradients.
            is_skipped = "kind = 'optim_step' and failed = 1 and content != ? and instr(content, ?)"
            values = (model.id, first, LATE.content, b'"category": "user"')
            skipped = {record.seq for record in await self.journal.requests(owned + is_skipped, values)}
            for record in ran:
                effect = record.kind not in EFFECTLESS and (record.seq not in failed or record.seq in skipped)
                self._add(record, effect=effect, done=True, failed_before=record.seq in failed)
            for record in await self.journal.requests("owner = ? and done is null", (model.id,)):
                if self.turns.passed(model.id, record.seq):
                    await self.futures.resolve(record.id, LATE, [body_dropped_of(record.id)])
                    continue
                self.futures.expect(record)
                self._add(record, effect=True, done=False)
        for record in await self.journal.requests("kind != 'asample' and done is null"):
            if record.owner not in self.turns and record.owner not in self._damaged:
                await self.futures.resolve(record.id, UNLOADED, [body_dropped_of(record.id)])

    async def _without_state(self, model: ModelRecord, why: str) -> None:
        """Of a model that cannot be restored: the others are served. Its state, and the requests since that have a result,
        stay for the next start: the cause may be gone by then."""
        self._damaged.add(model.id)
        note(f"{model.id}: it is not served, since {why}")
        for record in await self.journal.requests("owner = ? and done is null", (model.id,)):
            await self.futures.resolve(record.id, DAMAGED)

    async def unload(self, model: ModelRecord, why: str) -> None:
        """Takes it out of the trainers. Requests that have not run fail. A second call returns when the first has."""
        live = self._live.get(model.id)
        if live is None and model.id in self._damaged:
            self._damaged.discard(model.id)
            live = self._live[model.id] = Live()
        if live is None:
            return
        async with live.unloading:
            if model.id in self._live:
                await self._unload(model.id, live, why)

    async def _unload(self, name: str, live: Live, why: str) -> None:
        await self.turns.stop(name)
        waiting = self.turns.close(name)
        if live.rest is not None:
            await asyncio.wait([live.rest])
        for seq in waiting:
            await self._fail(request_id(name, seq), failure(why, user=True))
        if live.created:
            live.created = False
            await self._call(partial(self.models.remove, name))
        model = self.holdings.models[name]
        self.checkpoints.needed.pop(name, None)
        await self.journal.write([self.holdings.put(replace(model, unloaded=True, state=None))], lasting=True)
        if model.state is not None:
            await asyncio.to_thread(shutil.rmtree, self.checkpoints.folder_of(model.state), True)
        # Its first request may have failed meanwhile, or one that was repeated.
        self._live.pop(name, None)
        self._damaged.discard(name)

    async def _fail(self, request: str, outcome: Outcome) -> None:
        """Nothing if it has a result, as those have that are repeated after a restart."""
        if request in self.futures:
            await self.futures.resolve(request, outcome)

    def _add(self, record: RequestRecord, *, effect: bool, done: bool, failed_before: bool = False) -> None:
        """`effect`: False: it has none any more. `done`: its result is there already, and `failed_before` what it is."""
        data = None
        if effect and record.kind in ("forward", "forward_backward"):
            # Parsed beside what is running.
            data = asyncio.ensure_future(asyncio.to_thread(self._parsed, record))
        self.turns.add(record.owner, record.seq, partial(self._run, record, data, effect, done, failed_before))

    def _parsed(self, record: RequestRecord) -> TrainingData | RequestError:
        base, limits = self.models.base, self.settings.limits
        try:
            request = pb.ForwardBackwardRequest.FromString(record.body)
            data = training_data(request, vocab_size=base.vocab_size, max_length=base.max_length)
            if data.num_tokens > limits.max_tokens:
                raise RequestError(
                    f"data: {data.num_tokens} tokens, and a request may have {limits.max_tokens}. Send it in parts: gradients "
                    "add up until optim_step."
                )
            return data
        except RequestError as error:
            return error

    async def _run(
        self,
        record: RequestRecord,
        data: asyncio.Future[TrainingData | RequestError] | None,
        effect: bool,
        done: bool,
        failed_before: bool,
    ) -> asyncio.Future[Any] | None:
        live = self._live[record.owner]
        if effect and record.kind == "load_weights" and live.rest is not None and not live.rest.done():
            # It may be what writes the checkpoint.
            return live.rest
        rest: Rest | None = None
        failed = False
        if effect:
            live.changing = record.kind not in EFFECTLESS
            try:
                async with self._ended_by(record, done):
                    rest = await self._kind(record, data)
            except SlimeError as error:
                if done and not failed_before:
                    await self._not_repeated(record, error)
                    return None
                rest, failed = rest_of(failed_outcome(error)), True
            # Not if the server ends meanwhile.
            live.changing = False
        live.applied = record.seq
        state = None
        if effect and not failed and record.kind in ("optim_step", "load_weights"):
            state = await self.states.staged_if_due(record, live)
        live.rest = self.tasks.create_task(self._finish(record, live, live.rest, rest, state, done))
        if not live.created:
            await live.rest
            await self._give_up(record.owner)
        return None

    async def _finish(
        self,
        record: RequestRecord,
        live: Live,
        before: asyncio.Task[None] | None,
        rest: Rest | None,
        state: StagedState | None,
        done: bool,
    ) -> None:
        """The second half. It ends after those of all earlier requests of the model, so that a state which holds their effects
        is never kept while one of them has no result."""
        if before is not None:
            await before
        made: Done | None = None
        if rest is not None:
            try:
                async with self._ended_by(record, done):
                    made = await rest()
            except SlimeError as error:
                made = Done(outcome=failed_outcome(error))
        earlier = self.holdings.models[record.owner].state
        statements = [] if made is None else list(made.statements)
        if not done and made is not None and is_spent(record, made.outcome):
            statements.append(body_dropped_of(record.id))
        if state is not None:
            try:
                statements += await self.states.kept(record.owner, live, state)
            except SlimeError as error:
                live.unsaved_s += state.trained_s
                state = None
                self.states.keep_earlier(record.owner, live, error)
        if done or made is None:
            await self.journal.write(statements, lasting=True)
        else:
            await self.futures.resolve(record.id, made.outcome, statements)
        if made is not None and made.replaced is not None:
            await self.checkpoints.delete_folder(made.replaced)
        if state is not None and earlier is not None:
            await asyncio.to_thread(shutil.rmtree, self.checkpoints.folder_of(earlier), True)

    @contextlib.asynccontextmanager
    async def _ended_by(self, record: RequestRecord, done: bool) -> AsyncIterator[None]:
        """`Futures.ended_by`; if the request has a result already, the next start does not restore its model."""
        with held() as ended:
            async with self.futures.ended_by(record.id):
                yield
        error = ended.raised
        if error is None:
            return
        if done and isinstance(error, Exception) and not isinstance(error, SlimeError):
            model = self.holdings.models[record.owner]
            await self.journal.write([self.holdings.put(replace(model, damaged=True))], lasting=True)
        raise error

    async def _not_repeated(self, record: RequestRecord, error: SlimeError) -> None:
        """Of a request that succeeded before the restart, and fails now: what comes after it would be of other weights."""
        name = record.owner
        self._damaged.add(name)
        self.turns.close(name)
        live = self._live[name]
        if live.rest is not None:
            await asyncio.wait([live.rest])
        if live.created:
            live.created = False
            await self._call(partial(self.models.remove, name))
        why = f"its request {record.seq} ({record.kind}), which succeeded before, fails when it is repeated: {error}"
        await self._without_state(self.holdings.models[name], why)
        self._live.pop(name, None)

    async def _give_up(self, name: str) -> None:
        """Of a model whose first request failed: nothing else can be done with it."""
        for seq in self.turns.close(name):
            await self._fail(request_id(name, seq), failure("the model could not be created.", user=True))
        unloaded = replace(self.holdings.models[name], unloaded=True)
        await self.journal.write([self.holdings.put(unloaded)], lasting=True)
        # Its session may have ended meanwhile.
        self._live.pop(name, None)

    async def _kind(self, record: RequestRecord, data: asyncio.Future[TrainingData | RequestError] | None) -> Rest:
        """The first half."""
        live = self._live[record.owner]
        runs: dict[str, Callable[[RequestRecord], Coroutine[Any, Any, Rest]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "optim_step": self._optim_step,
            "save_weights": partial(self.saving.save, live=live),
            "save_weights_for_sampler": partial(self.saving.save_for_sampler, live=live),
        }
        if data is None:
            return await runs[record.kind](record)
        parsed = await data
        if isinstance(parsed, RequestError):
            raise parsed
        return await self._forward_backward(record, parsed)

    async def _create(self, record: RequestRecord) -> Rest:
        model = self.holdings.models[record.owner]
        await self._call(partial(self.models.create, model.id, model.spec))
        self._live[model.id].created = True
        return rest_of(json_outcome({"type": "create_model", "model_id": model.id}))

    async def _load(self, record: RequestRecord) -> Rest:
        asked = LoadWeightsRequest.model_validate_json(record.body)
        model, live = self.holdings.models[record.owner], self._live[record.owner]
        checkpoint = self.holdings.checkpoint(asked.path, record.tenant)
        if checkpoint.kind != "training":
            raise RequestError(f"path {asked.path}: weights for sampling alone; load what save_state wrote.")
        if checkpoint.spec != model.spec:
            raise RequestError(
                f"path {asked.path}: of a model with other LoRA settings ({checkpoint.spec}; this one has {model.spec})."
            )
        folder, live.loaded = self.checkpoints.folder_of(checkpoint.folder), record.seq
        # Until the model's own state is saved.
        is_new = self.checkpoints.need(model.id, checkpoint.id)
        try:
            await self._call(partial(self.models.load, model.id, model.spec, folder, optimizer=asked.optimizer))
        except SlimeError:
            if is_new:
                self.checkpoints.needed[model.id].discard(checkpoint.id)
            raise
        live.created, live.gradients = True, False
        live.steps = checkpoint.steps if asked.optimizer else 0
        return rest_of(json_outcome({"type": "load_weights", "path": asked.path, "model_id": model.id}))

    async def _forward_backward(self, record: RequestRecord, data: TrainingData) -> Rest:
        began = time.monotonic()
        if record.kind == "forward":
            log_probs = await self._call(partial(self.models.forward, record.owner, data.datums))
        else:
            first, *others = data.parts
            run, live = self.models.forward_backward, self._live[record.owner]
            # Before, since it may fail with some of them.
            live.gradients = True
            log_probs = await self._call(partial(run, record.owner, first.datums, first.loss))
            for part in others:
                await self._call(partial(run, record.owner, part.datums, part.loss))
            live.unsaved_s += time.monotonic() - began
        computed = asyncio.ensure_future(asyncio.to_thread(trained_outcome, self.registry, data, log_probs))

        async def rest() -> Done:
            return Done(outcome=await computed)

        return rest

    async def _optim_step(self, record: RequestRecord) -> Rest:
        began = time.monotonic()
        adam = adam_of(OptimStepRequest.model_validate_json(record.body))
        live = self._live[record.owner]
        try:
            grad_norm = await self._call(partial(self.models.optim_step, record.owner, adam))
        except SkippedStep:
            live.gradients = False
            raise
        live.steps += 1
        live.gradients = False
        live.unsaved_s += time.monotonic() - began
        metrics = {"grad_norm": grad_norm, "learning_rate": adam.lr, "step": float(live.steps)}
        return rest_of(json_outcome({"metrics": metrics}))

    async def save_states(self) -> None:
        """See `ModelStates.save_all`."""
        await self.states.save_all(self._live)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.trainer, work)


def trained_outcome(registry: Registry, data: TrainingData, log_probs: Float32) -> Outcome:
    """`log_probs`: of all response tokens."""
    losses = np.zeros(len(log_probs))
    for part in data.parts:
        rows = data.rows(part)
        losses[rows] += loss_of(registry, part.loss, part.datums, log_probs[rows])
    outputs = {"logprobs": data.by_position(log_probs)}
    if data.parts[0].loss["name"] == "sft":
        outputs["elementwise_loss"] = data.by_position(losses)
    return forward_backward_outcome(outputs, {"loss:sum": float(losses.sum()), "tokens:sum": float(data.num_tokens)})


def is_spent(record: RequestRecord, outcome: Outcome) -> bool:
    """No restart runs it again, so that its data is needed no more. A failed optim_step may have dropped gradients."""
    return record.kind in EFFECTLESS or (outcome.failed and record.kind == "forward_backward")


def failed_outcome(error: SlimeError) -> Outcome:
    if isinstance(error, StorageError):
        # Its text is for who runs the server.
        note(str(error))
        return failure(NOT_WRITTEN, user=False)
    return failure(str(error), user=not isinstance(error, SERVERS_FAULT))


def request_id(owner: str, seq: int) -> str:
    return f"{owner}:{seq}"
