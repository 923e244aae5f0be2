"""Sources, middlewares, trackers and transports with one thing wrong."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import xxhash

from acme_faults.rollouts import driver_of
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import SourceExample
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_core.contracts.source import DataSource, SourceDriver
from slime_core.contracts.tracker import Tracker, TrackerDriver
from slime_core.contracts.transport import TransportDriver, WeightTransport
from slime_core.errors import CheckpointError, EngineError
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.report import WeightUpdateReport


class CountingConfig(DriverConfig):
    """How many rows there are."""

    rows: int = 6
    """Sums, one a row."""


class Counting(DataSource):
    """Sums in another order each epoch, by the seed."""

    def __init__(self, rows, renderer, seed):
        self.rows, self.renderer, self.seed, self.drawn = rows, renderer, seed, 0

    def row_at(self, place):
        epoch, offset = divmod(place, self.rows)
        return random.Random(f"{self.seed}/{epoch}").sample(range(self.rows), self.rows)[offset]

    def draw(self, place):
        row = self.row_at(place)
        return self.renderer.render({"input": f"{row}+{row}="}, group_index=place, origin=f"row {row}")

    def take(self, num_prompts):
        places = range(self.drawn, self.drawn + num_prompts)
        self.drawn += num_prompts
        return [self.draw(place) for place in places]

    def state(self):
        return {"drawn": self.drawn, "fingerprint": self.fingerprint()}

    def restore(self, state):
        if state["fingerprint"] != self.fingerprint():
            raise CheckpointError("other data")
        self.drawn = state["drawn"]

    @property
    def num_rows(self):
        return self.rows

    def fingerprint(self):
        return f"rows {self.rows}"


class Counts(SourceDriver):
    """Nothing is wrong with it."""

    Config = CountingConfig
    Source = Counting

    @classmethod
    def build(cls, config):
        return lambda renderer, *, seed: cls.Source(config.rows, renderer, seed)

    @classmethod
    def examples(cls, folder):
        return [SourceExample(seeded=True, other_options={"rows": 7})]


def counts(**methods):
    """A driver of Counting with some methods replaced."""
    return type("Spoilt", (Counts,), {"Source": type("Spoilt", (Counting,), methods), "__doc__": "Spoilt."})


IGNORES_SEED = counts(row_at=lambda self, place: place % self.rows)
FORGETS_POSITION = counts(restore=lambda self, state: None)
RENUMBERS = counts(draw=lambda self, place: replace(Counting.draw(self, place), group_index=place % self.rows))
WITH_REPLACEMENT = counts(row_at=lambda self, place: random.Random(f"{self.seed}/{place}").randrange(self.rows))
WIDE_TOKENS = counts(
    draw=lambda self, place: replace(
        (prompt := Counting.draw(self, place)), token_ids=prompt.token_ids.astype(np.int64)
    )
)
NO_FINGERPRINT = counts(fingerprint=lambda self: "the same for all")
FORGETS_OTHERS = counts(restore=lambda self, state: setattr(self, "drawn", state["drawn"]))
OPENED = []


def row_of_this_one(self, place):
    # The first one forwards, the second one backwards.
    if self not in OPENED:
        OPENED.append(self)
    return (place if OPENED.index(self) % 2 else -place) % self.rows


BY_CHANCE = counts(row_at=row_of_this_one)


def take_sorted(self, num_prompts):
    prompts = sorted(Counting.take(self, num_prompts), key=lambda prompt: prompt.text)
    first = self.drawn - num_prompts
    return [replace(prompt, group_index=first + number) for number, prompt in enumerate(prompts)]


SORTS_CHUNKS = counts(take=take_sorted)


FaultyMiddleware = driver_of(MiddlewareDriver, RouterMiddleware, "__call__")


class Passes(FaultyMiddleware):
    """Nothing is wrong with it."""

    @staticmethod
    async def run(request, call_next):
        return await call_next(request)


class Reseeds(FaultyMiddleware):
    """Changes the seed."""

    @staticmethod
    async def run(request, call_next):
        return await call_next(replace(request, seed=request.seed + 1))


class Calms(FaultyMiddleware):
    """Returns a response where the engine died."""

    @staticmethod
    async def run(request, call_next):
        try:
            return await call_next(request)
        except EngineError:
            return Completion.empty(request, FinishReason.ABORT)


class Swaps(FaultyMiddleware):
    """Returns the response that came last."""

    latest = None

    @classmethod
    async def run(cls, request, call_next):
        import asyncio

        cls.latest = await call_next(request)
        await asyncio.sleep(0)
        return replace(cls.latest, request_id=request.request_id)


class Clings(FaultyMiddleware):
    """Does not let go of a request whose caller is gone."""

    @staticmethod
    async def run(request, call_next):
        import asyncio

        try:
            return await call_next(request)
        except asyncio.CancelledError:
            return Completion.empty(request, FinishReason.ABORT)


class CountsInSets(MiddlewareDriver):
    """Its metrics are no numbers."""

    @classmethod
    def build(cls, config):
        class Middleware(RouterMiddleware):
            async def __call__(self, request, call_next):
                return await call_next(request)

            def metrics(self):
                return {"sessions": {1, 2}}

        return Middleware()


class Notes(Tracker):
    """Lines of JSON in a file of its own."""

    def start(self, run):
        self.run, self.lines = run, 0
        self.file = (run.run_dir / "notes").open("a")

    def log(self, axis, step, metrics, *, rollout_id):
        self.lines += 1
        self.file.write(json.dumps([axis, step, dict(metrics)]) + "\n")

    def finish(self):
        self.file.close()


class TakesNotes(TrackerDriver):
    """Nothing is wrong with it."""

    Tracker = Notes

    @classmethod
    def build(cls, config):
        return cls.Tracker()


def notes(**methods):
    return type("Spoilt", (TakesNotes,), {"Tracker": type("Spoilt", (Notes,), methods), "__doc__": "Spoilt."})


def log_and_clear(self, axis, step, metrics, *, rollout_id):
    Notes.log(self, axis, step, metrics, rollout_id=rollout_id)
    metrics.clear()


def log_finite(self, axis, step, metrics, *, rollout_id):
    if not all(math.isfinite(value) for value in metrics.values()):
        raise ValueError("not a number")
    Notes.log(self, axis, step, metrics, rollout_id=rollout_id)


def start_once(self, run):
    if run.resumed_at == 5:
        raise FileExistsError("the folder exists")
    Notes.start(self, run)


def start_clean(self, run):
    (run.run_dir / "config.toml").unlink(missing_ok=True)
    Notes.start(self, run)


def finish_something(self):
    self.file.close()
    self.mean = 1 / self.lines


def finish_late(self):
    # Closed with the last reference, which is kept.
    KEPT.append(self.file)
    if not self.lines:
        self.file.close()


KEPT = []
LEAVES_OPEN = notes(finish=finish_late)
CLEARS_METRICS = notes(log=log_and_clear)
REQUIRES_FINITE = notes(log=log_finite)
STARTS_ONCE = notes(start=start_once)
TIDIES_UP = notes(start=start_clean)
AVERAGES_NOTHING = notes(finish=finish_something)


async def carry(trainers, engines, version, *, edit=None, verify=True, more=0, empty=False):
    count = 0
    async for bucket in trainers.stream_weights(version, 1 << 20):
        await engines.call_all("load_bucket", bucket if edit is None else edit(bucket))
        count += 1
    if not count and not empty:
        raise EngineError("nothing was exported")
    if verify and count and set(await engines.call_all("version")) != {version}:
        raise EngineError("an engine stays behind")
    return WeightUpdateReport(version=version, seconds=0.0, bytes_sent=0, buckets=count + more)


FaultyTransport = driver_of(TransportDriver, WeightTransport, "push")


class Carries(FaultyTransport):
    """Nothing is wrong with it."""

    @staticmethod
    async def run(trainers, engines, version):
        return await carry(trainers, engines, version)


def rounded(bucket):
    data = bucket.data.copy()
    data[:1] = 0
    return replace(bucket, data=data, checksum=xxhash.xxh3_64_hexdigest(memoryview(data)))


class Rounds(FaultyTransport):
    """Loses a bit on the way."""

    @staticmethod
    async def run(trainers, engines, version):
        return await carry(trainers, engines, version, edit=rounded)


class Boasts(FaultyTransport):
    """Reports a bucket more than it sent."""

    @staticmethod
    async def run(trainers, engines, version):
        return await carry(trainers, engines, version, more=1)


class PushesOnce(WeightTransport):
    """Cannot push a version again."""

    def __init__(self):
        self.done = set()

    async def push(self, trainers, engines, version):
        if version in self.done:
            raise EngineError("pushed already")
        self.done.add(version)
        return await carry(trainers, engines, version)


class OnlyOnce(TransportDriver):
    """A driver of the above."""

    @classmethod
    def build(cls, config):
        return PushesOnce()


class Forgives(FaultyTransport):
    """Continues after a refusal."""

    @staticmethod
    async def run(trainers, engines, version):
        try:
            return await carry(trainers, engines, version)
        except EngineError as error:
            if "refused" not in str(error):
                raise
            return WeightUpdateReport(version=version, seconds=0.0, bytes_sent=0, buckets=0)


class LooksAway(FaultyTransport):
    """Does not ask which version the engines have."""

    @staticmethod
    async def run(trainers, engines, version):
        return await carry(trainers, engines, version, verify=False)


class CarriesNothing(FaultyTransport):
    """Is content with an empty export."""

    @staticmethod
    async def run(trainers, engines, version):
        return await carry(trainers, engines, version, empty=True)
