"""LocalEngine: the asynchronous face of the decoder."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from slime_core.contracts.engine import Capability, EngineInfo, MemoryTag, RolloutEngine
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.image import Image
from slime_core.types.schedule import EngineEvent
from slime_core.types.weights import Bucket
from slime_local.admission import Admission
from slime_local.config import CAPABILITIES, LocalConfig
from slime_local.decoder import Decoder
from slime_local.image_inputs import ImageInputs, pictures_of
from slime_local.loaded_adapters import LoadedAdapters
from slime_local.model import RolloutModel, load_model
from slime_local.request_checks import check_prompts, check_requests
from slime_local.request_row import ListTicket, RequestRow, StreamTicket, Ticket
from slime_local.schedule import Gate
from slime_local.stop_text import StopText
from slime_local.threads import PartThreads, choose_threads, part_threads, use_threads
from slime_local.weights import WeightLoader
from slime_training.adapters.engine import AdapterEngine, PromptLogProbs


class LocalEngine(RolloutEngine, AdapterEngine):
    """Continuous batching over a transformers model, in the event loop of the caller.

    One background task runs decode steps while there is work, and gives the loop a turn after each. The random draw
    for a token depends on the request's seed and the token's position in the sequence alone, so that an aborted
    request continues with the same draws when it is sent again with its tokens so far. Log-probs are those of the full
    vocabulary at the sampling temperature, whatever top-p, top-k, min_new_tokens or a repetition penalty left out.

    While a version is partly loaded nothing is computed, paused or not. Requests that run when a version becomes
    active keep their tokens, and their keys and values are computed anew under the new weights.
    """

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._setup: EngineSetup | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._paused = False
        self._absent: frozenset[MemoryTag] = frozenset()
        """What was given back."""
        self._version = -1
        self._pictures: weakref.WeakValueDictionary[tuple[bytes, tuple[Image, ...]], ImageInputs] = (
            weakref.WeakValueDictionary()
        )
        """Image inputs of prompts that wait or run; the responses to one prompt share them."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Loads the weights of the folder; the version stays -1 until a first set of buckets. Raises ModelError."""
        if self._setup is not None:
            raise EngineError(f"engine {setup.index} has been started already.")
        with ThreadPoolExecutor(1, "load") as thread:
            # The thread ends, and with it a pool of OpenMP threads that loading made; see `use_threads`. The event loop waits
            # meanwhile, so that no other engine loads: transformers replaces methods of its classes then, for all threads.
            self._model: RolloutModel = thread.submit(load_model, self._config, setup).result()
        size, parts = self._model.network.num_parameters(), 1
        if self._model.device.type == "cpu":
            parts = part_threads(self._config.threads, size, reads_only=self._model.reads_only)
            use_threads(choose_threads(self._config.threads, size))
        self._threads = PartThreads(parts)
        self._stop_text = StopText(setup.model_path, setup.trust_remote_code)
        self._decoder = self._new_decoder(setup)
        self._adapters = LoadedAdapters(
            self._model,
            lambda: self._new_decoder(setup),
            most=0 if setup.true_on_policy else self._config.most_adapters,
            engine=f"engine {setup.index}",
        )
        self._gate = Gate(self._decoder, records=setup.records)
        self._loader = WeightLoader(self._model.network, setup.index)
        self._runnable = asyncio.Event()
        self._whole = asyncio.Event()
        self._whole.set()
        self._setup = setup
        self._task = asyncio.create_task(self._serve(), name=f"engine-{setup.index}-decode")
        self._task.add_done_callback(self._note_end)
        capabilities = CAPABILITIES
        if setup.true_on_policy:
            capabilities |= {Capability.BATCH_INVARIANT, Capability.TRUE_ON_POLICY}
        elif self._config.most_adapters:
            capabilities |= {Capability.ADAPTERS}
        if self._model.images is not None:
            capabilities |= {Capability.IMAGES, Capability.VIDEOS}
        return EngineInfo(capabilities=capabilities)

    def _new_decoder(self, setup: EngineSetup) -> Decoder:
        def held_elsewhere() -> int:
            return sum(other.kv_bytes for other in self._decoders() if other is not made)

        made = Decoder(
            self._model,
            self._stop_text,
            engine_index=setup.index,
            threads=self._threads,
            admission=Admission(
                max_running=min(self._config.max_running, setup.max_batch),
                max_prefill_tokens=self._config.max_prefill_tokens,
                kv_cache_bytes=self._config.kv_cache_bytes,
                max_context_len=setup.max_context_len,
                held_elsewhere=held_elsewhere,
            ),
        )
        return made

    def _decoders(self) -> Iterator[Decoder]:
        """Of requests without an adapter, and of each adapter."""
        yield self._decoder
        yield from self._adapters.decoders()

    # ---------------------------------------------------------------- the decode task

    async def _serve(self) -> None:
        while True:
            await self._runnable.wait()
            # An abort or a pause may have come between the wake-up and this turn.
            if not self._runnable.is_set():
                continue
            if self._decoder.busy and not self._gate.waits:
                self._decoder.step()
                self._gate.stepped()
                self._consider()
                await asyncio.sleep(0)
            for step in self._adapters.turns():
                if not self._runnable.is_set():
                    break
                step()
                self._consider()
                await asyncio.sleep(0)

    def _consider(self) -> None:
        """Lets the decode task run exactly when there is work and nothing holds it, and others compute with whole weights."""
        if self._loader.incomplete:
            self._whole.clear()
        else:
            self._whole.set()
        # In a replay the script decides when weights come; a pause may come sooner than in the recorded run.
        held = (self._paused and not self._gate.scripted) or self._absent or self._loader.incomplete
        busy = (self._decoder.busy and not self._gate.waits) or self._adapters.busy
        if busy and not held:
            self._runnable.set()
        else:
            self._runnable.clear()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Called when the decode task has ended, by `stop` or by an error: fails every call that waits for it."""
        cause = None if task.cancelled() else task.exception()
        text = f"{type(cause).__name__}: {cause}" if cause is not None else "it was stopped"
        self._failure = EngineError(f"{self._name} does not decode any more: {text}.")
        self._failure.__cause__ = cause
        for decoder in self._decoders():
            decoder.fail(self._failure)
        self._gate.fail(self._failure)
        # Who waits for it raises the failure.
        self._whole.set()

    @property
    def _name(self) -> str:
        return "engine local" if self._setup is None else f"engine {self._setup.index}"

    def _ready(self) -> EngineSetup:
        if self._setup is None:
            raise EngineError("engine local: not started; call start first.")
        if self._failure is not None:
            raise self._failure
        return self._setup

    async def _until_whole(self, call: str) -> None:
        """Returns when nothing is partly loaded. Raises EngineError if it sleeps or does not run then."""
        while self._loader.incomplete and self._failure is None:
            await self._whole.wait()
        self._ready()
        if self._absent:
            raise EngineError(f"{self._name}: {call} while asleep; call wake first.")

    # ---------------------------------------------------------------- requests

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Raises EngineRefused for a request that cannot be served, before any of the call runs."""
        if not requests:
            return []
        ticket = ListTicket(len(requests))
        with self._entered(requests, ticket):
            return await ticket.future

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """Yields the responses of `generate` as they end."""
        ticket = StreamTicket()
        with self._entered(requests, ticket):
            for _ in requests:
                yield await ticket.next()

    @contextlib.contextmanager
    def _entered(self, requests: Sequence[GenerateRequest], ticket: Ticket) -> Iterator[None]:
        """Puts the requests into the decoder; ends those that still run when the caller goes away."""
        setup = self._ready()
        if self._absent:
            raise EngineError(f"{self._name}: generate while asleep; call wake first.")
        in_use = set().union(*(decoder.request_ids for decoder in self._decoders()))
        check_requests(requests, self._name, self._model, self._stop_text, in_use)
        adapters = {name: self._adapters.decoder(name) for request in requests if (name := request.adapter) is not None}
        rows: dict[str | None, list[RequestRow]] = {}
        for place, request in enumerate(requests):
            limit = min(request.sampling.max_new_tokens, setup.max_context_len - len(request.token_ids))
            row = RequestRow(request, ticket, place, limit, pictures=self._pictures_of(request))
            rows.setdefault(request.adapter, []).append(row)
        plain = rows.pop(None, [])
        if rows and not self._decoder.busy:
            # Keys and values are for the adapters now.
            self._decoder.release()
        self._gate.submit(plain)
        for name, its in rows.items():
            if name is not None:
                adapters[name].submit(its)
        self._consider()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._decoder.end(lambda row: row.ticket is ticket)
            self._adapters.end(lambda row: row.ticket is ticket)
            self._consider()
            raise

    def _pictures_of(self, request: GenerateRequest) -> ImageInputs | None:
        """Those of an equal prompt whose responses are not finished, or new ones."""
        if not request.images or self._model.images is None:
            return None
        key = (request.token_ids.tobytes(), request.images)
        found = self._pictures.get(key)
        if found is None:
            found = self._pictures[key] = pictures_of(self._model.network, self._model.images, request)
        return found

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ids that are not running are ignored: they may just have ended."""
        self._ready()
        names = None if request_ids is None else set(request_ids)
        self._gate.abort(names)
        self._adapters.end(lambda row: names is None or row.request.request_id in names)
        self._consider()

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        self._ready()
        self._paused = True
        self._consider()

    async def resume(self) -> None:
        """Raises EngineError if a version is partly loaded."""
        self._ready()
        if self._loader.incomplete:
            raise EngineError(f"{self._name}: resume while a version is partly loaded; send all its buckets first.")
        self._paused = False
        self._consider()

    async def load_bucket(self, bucket: Bucket) -> None:
        """See `WeightLoader.load`."""
        self._ready()
        if MemoryTag.WEIGHTS in self._absent:
            raise EngineError(f"{self._name}: load_bucket without memory for its weights; call wake first.")
        await self._gate.may_load(bucket.version)
        # It may have ended meanwhile.
        self._ready()
        try:
            complete = self._loader.load(bucket)
            if complete:
                self._version = bucket.version
                for decoder in self._decoders():
                    decoder.activate(bucket.version)
                self._gate.loaded(bucket.version)
        finally:
            self._consider()

    async def version(self) -> int:
        self._ready()
        return self._version

    async def checksum(self) -> str:
        """See `WeightLoader.checksum`."""
        self._ready()
        return self._loader.checksum()

    # ---------------------------------------------------------------- adapters

    async def load_adapter(self, name: str, scale: float, bucket: Bucket) -> None:
        """See `LoadedAdapters.load`."""
        self._ready()
        self._adapters.load(name, scale, bucket)
        self._adapters.decoder(name).activate(self._version)

    async def drop_adapter(self, name: str) -> None:
        self._ready()
        self._adapters.drop(name)
        self._consider()

    async def prompt_log_probs(
        self, prompts: Sequence[npt.NDArray[np.int32]], top_k: int, adapter: str | None
    ) -> list[PromptLogProbs]:
        self._ready()
        check_prompts(prompts, top_k, self._name, self._model)
        used = self._adapters.using(adapter)
        found = []
        for tokens in prompts:
            await self._until_whole("prompt_log_probs")
            with self._adapters.layers.using(used):
                found.append(self._model.prompt_log_probs(tokens, top_k))
            # Lets other tasks of this event loop run.
            await asyncio.sleep(0)
        return found

    # ---------------------------------------------------------------- scoring

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        self._ready()
        responses = []
        for tokens, count in zip(sequences, num_tokens, strict=True):
            await self._until_whole("score")
            responses.append(self._model.log_probs(tokens, count))
            # Lets other tasks of this event loop run.
            await asyncio.sleep(0)
        return responses

    # ---------------------------------------------------------------- schedules

    async def drain_events(self) -> Sequence[EngineEvent]:
        self._ready()
        return self._gate.drain_events()

    async def replay_events(self, events: Sequence[EngineEvent]) -> None:
        self._ready()
        self._gate.replay_events(events)
        self._consider()

    # ---------------------------------------------------------------- life

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Frees keys and values, except those of requests that a pause holds; on a GPU the weights go to the host."""
        self._ready()
        chosen = frozenset(MemoryTag if tags is None else tags) - self._absent
        for decoder in self._decoders() if MemoryTag.KV_CACHE in chosen else ():
            if not (self._paused and decoder.busy):
                decoder.release()
        self._absent |= chosen
        self._consider()
        if MemoryTag.WEIGHTS in chosen and self._model.device.type == "cuda":
            self._model.network.to("cpu")
            torch.cuda.empty_cache()

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        self._ready()
        chosen = frozenset(MemoryTag if tags is None else tags)
        if MemoryTag.WEIGHTS in chosen:
            self._model.network.to(self._model.device)
        self._absent -= chosen
        self._consider()

    async def health(self) -> None:
        self._ready()

    async def stop(self) -> None:
        """Requests that still run fail with EngineError. Stopping twice, or before `start`, does nothing."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._threads.close()
