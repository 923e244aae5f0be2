"""The Ray launcher, with a backend and an engine that are sent to the actors as a plugin file."""

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray
from ray._private.internal_api import memory_summary
from ray.exceptions import RayActorError, RayTaskError

from slime_core.config.part import PluginSpec
from slime_core.contracts.launcher import LauncherSetup
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import EngineSetup, TrainerSetup
from slime_core.errors import CheckpointError, ConfigError, EngineError, PluginError, RankTimeout, TrainingError
from slime_core.registry import Registry
from slime_core.registry.plugin_file import PluginFile
from slime_core.types.batch import Batch, TokenColumns
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_worker import EngineWorkerSpec
from slime_core.workers.limited_rank import limited
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.train_worker import TrainWorkerSpec
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.listening_sockets import listening_sockets
from slime_ray.actor_group import ActorGroup, Member, Roster
from slime_ray.actors import Location, StartedProcess
from slime_ray.cluster import RayCluster
from slime_ray.config import RayConfig
from slime_ray.launcher import RayLauncher, Slot, by_device, shares_of
from slime_ray.plugin import RayDriver

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PLUGIN = '''
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import time

import numpy as np

from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import EngineDriver, EngineInfo, RolloutEngine
from slime_core.errors import CheckpointError, EngineError
from slime_core.plugin import driver, loss
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.weights import Bucket
from slime_training.process_group import join_group


class FakeConfig(DriverConfig):
    meet: bool = True
    """Join the other ranks."""


class FakeBackend:
    def __init__(self, config):
        self.config = config

    def setup(self, setup):
        import torch
        import torch.distributed as dist

        self.reports = {"rank": setup.rank, "local_rank": setup.local_rank, "rendezvous": setup.rendezvous}
        if self.config.meet:
            join_group(setup)
            total = torch.tensor(10.0**setup.rank)
            dist.all_reduce(total)
            self.reports |= {"total": total.item()}
        self.setup_ = setup
        return Layout(dp_rank=setup.rank, dp_size=setup.world_size)

    def save(self, folder):
        print("worker prints", folder.name, flush=True)
        rank = self.setup_.rank
        if folder.name == "full":
            raise CheckpointError(f"rank {rank} cannot write {folder}")
        if folder.name == "bug":
            return {}["missing"]
        if folder.name == "die-1":
            os.write(2, b"last words\\n")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
        reports = self.reports | environment | {"pid": os.getpid()}
        (folder / f"{rank}.json").write_text(json.dumps(reports))

    def export_weights(self, *, all_ranks=False):
        progress = self.setup_.model_path / f"progress_{self.setup_.rank}"
        count, size = json.loads((self.setup_.model_path / "export.json").read_text())
        for index in range(count):
            # Whole at any time: the test reads it meanwhile.
            aside = progress.with_suffix(".aside")
            aside.write_text(str(index))
            aside.replace(progress)
            if index == 5:
                raise CheckpointError("export stops")
            import torch

            yield {f"w{index}": torch.full((size,), index, dtype=torch.uint8)} if self.setup_.rank == 0 else None

    def close(self):
        (self.setup_.model_path / f"closed_{self.setup_.rank}").touch()


@driver("slime.backends", "fake")
class FakeBackendDriver(BackendDriver):
    Config = FakeConfig

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout(dp_rank=rank, dp_size=world_size)

    @classmethod
    def build(cls, config):
        return FakeBackend(config)


def place_of(array):
    """The file mapping that an array lies in, and where in it."""
    address = array.__array_interface__["data"][0]
    for line in open("/proc/self/maps"):
        span, _, offset, device, inode = line.split()[:5]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return device, inode, int(offset, 16) + address - start


class FakeEngine:
    # Responses as they end, as an engine without a stream of its own gives them.
    stream = RolloutEngine.stream

    def __init__(self):
        self.seen = []
        self.running = {}

    async def prepare_start(self, setup):
        self.index, self.run_dir = setup.index, setup.run_dir
        (setup.run_dir / f"prepared_{setup.index}").write_text(str(os.getpid()))

    async def start(self, setup):
        self.index = setup.index
        self.run_dir = setup.run_dir
        if setup.num_nodes > 1:
            reports = {"host": setup.host, "rendezvous": setup.rendezvous, "pid": os.getpid()}
            (setup.run_dir / f"machine_{setup.node_rank}.json").write_text(json.dumps(reports))
        if (setup.run_dir / "slow_to_go").exists():
            # Ends with this process, a little later.
            servers = [
                subprocess.Popen(["sh", "-c", "read line; sleep 1"], stdin=subprocess.PIPE, start_new_session=True)
                for _ in range(2)
            ]
            (setup.run_dir / "servers.json").write_text(json.dumps([server.pid for server in servers]))
            if (setup.run_dir / "starts_long").exists():
                (setup.run_dir / "starts").touch()
                await asyncio.sleep(600)
            return EngineInfo(capabilities=frozenset(), pid=servers[0].pid)
        return EngineInfo(capabilities=frozenset(), address=f"engine-{setup.index}")

    async def health(self):
        pass

    async def generate(self, requests):
        (request,) = requests
        if request.seed == 99:
            raise EngineError("seed 99 cannot be drawn")
        stop = self.running[request.request_id] = asyncio.Event()
        reason = FinishReason.STOP
        try:
            await asyncio.wait_for(stop.wait(), request.seed / 100)
            reason = FinishReason.ABORT
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            (self.run_dir / f"cancelled_{request.request_id}").touch()
            raise
        tokens = request.token_ids[::-1].copy()
        return [Completion(request_id=request.request_id, token_ids=tokens, engine_index=self.index,
                           log_probs=np.zeros(len(tokens), np.float32), finish_reason=reason, spans=())]

    async def abort(self, request_ids=None):
        for name in request_ids:
            if name in self.running:
                self.running[name].set()

    async def load_bucket(self, shared):
        arrays = {f.name: getattr(shared, f.name) for f in dataclasses.fields(shared)}
        arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
        self.seen.append(shared)
        return {
            name: {"writeable": a.flags.writeable, "owndata": a.flags.owndata, "place": place_of(a),
                   "sum": float(a.astype(np.float64).sum())}
            for name, a in arrays.items()
        }

    async def version(self):
        return os.getpid()

    async def commit_weights(self, version):
        (self.run_dir / "began_commit").touch()
        try:
            await asyncio.Event().wait()
        finally:
            (self.run_dir / "cancelled_commit").touch()

    async def pause(self):
        self.seen.clear()

    async def stop(self):
        (self.run_dir / f"stopped_{self.index}").touch()


@driver("slime.engines", "fake")
class FakeEngineDriver(EngineDriver):
    @classmethod
    def build(cls, config):
        return FakeEngine()


@loss("fake")
def fake(inputs, segments):
    raise AssertionError
'''

FILE = PluginFile(path=Path("fakes.py"), text=PLUGIN, sha256="f" * 64)
OBJECTIVE = ObjectiveSpec(
    loss=PluginSpec(group="slime.losses", name="fake", options={}),
    kl=None, kl_loss_coef=0.0, use_unbiased_kl=False, entropy_coef=0.0, corrections=(), old_from_current=False,
            old_from_rollout=False,
)  # fmt: skip


def agreement(*specs: PluginSpec) -> Agreement:
    registry = Registry([FILE])
    return Agreement.of([spec.resolve(registry) for spec in specs], [FILE])


def train_specs(folder: Path, *, meet: bool, world_size: int = 2) -> list[TrainWorkerSpec]:
    backend = PluginSpec(group="slime.backends", name="fake", options={"meet": meet})
    return [
        TrainWorkerSpec(
            agreement=agreement(backend, OBJECTIVE.loss),
            backend=backend,
            objective=OBJECTIVE,
            temperature=1.0,
            setup=TrainerSetup(
                role="actor",
                rank=rank,
                world_size=world_size,
                local_rank=-1,
                rendezvous="",
                device="cpu",
                model_path=folder,
                optimizer=OptimizerConfig(),
                total_steps=1,
                seed=0,
            ),
        )
        for rank in range(world_size)
    ]


def engine_specs(folder: Path, count: int) -> list[EngineWorkerSpec]:
    engine = PluginSpec(group="slime.engines", name="fake", options={})
    return [
        EngineWorkerSpec(
            agreement=agreement(engine),
            engine=engine,
            setup=EngineSetup(
                index=index, model_path=folder, device="cpu", seed=0, max_context_len=64, max_batch=64, run_dir=folder
            ),
        )
        for index in range(count)
    ]


def requests(*seeds: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{number}",
            token_ids=np.arange(number + 1, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=4),
            seed=seed,
        )
        for number, seed in enumerate(seeds)
    ]


class Workers:
    """Two ranks and two engines on one private cluster, for all tests of this module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = RayLauncher(RayConfig(), LauncherSetup())
        self.others = set(descendants(os.getpid()))
        """Processes that exist already, this one included."""

    async def start(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        (self.ranks, (self.engines, self.infos)) = await asyncio.gather(
            self.launcher.start_trainers(train_specs(self.folder, meet=True)),
            self.launcher.start_engines(engine_specs(self.folder, 2)),
        )
        assert signal.getsignal(signal.SIGTERM) is handler
        self.layouts = await asyncio.gather(*(rank.call("setup") for rank in self.ranks))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory):
    workers = Workers(tmp_path_factory.mktemp("workers"))
    await workers.start()
    yield workers
    await workers.launcher.stop()
    await workers.launcher.stop()
    assert not ray.is_initialized()


async def test_actors_hold_workers_that_know_their_place(workers, tmp_path):
    assert [layout.dp_rank for layout in workers.layouts] == [0, 1]
    assert [info.address for info in workers.infos] == ["engine-0", "engine-1"]
    await asyncio.gather(*(rank.call("save", tmp_path) for rank in workers.ranks))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [t["rank"] for t in reports] == [0, 1]
    assert [t["local_rank"] for t in reports] == [0, 1]
    assert reports[0]["rendezvous"] == reports[1]["rendezvous"]
    assert reports[0]["rendezvous"].startswith("tcp://127.0.0.1:")
    # 10^0 + 10^1: each rank took part once in a reduction over gloo.
    assert [t["total"] for t in reports] == [11.0, 11.0]
    cores = len(os.sched_getaffinity(0))
    expected = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // 3)))
    assert {t["OMP_NUM_THREADS"] for t in reports} == {expected}
    pids = {t["pid"] for t in reports} | {await engine.call("version") for engine in workers.engines} | {os.getpid()}
    assert len(pids) == 5


async def test_private_cluster_listens_on_loopback_only(workers, tmp_path):
    """Every listening socket of Ray's processes and of the ranks, which hold a rendezvous and gloo's."""
    found = listening_sockets()
    # GCS, raylet twice, agent, this driver, four workers, where the ranks meet.
    assert len(found) >= 10
    assert [str(own) for own in found if not own.is_loopback] == []
    await workers.ranks[0].call("save", tmp_path)
    rendezvous = json.loads((tmp_path / "0.json").read_text())["rendezvous"]
    assert int(rendezvous.rpartition(":")[2]) in [own.port for own in found]
    assert (workers.launcher._cluster.folder.stat().st_mode & 0o777) == 0o700


async def test_cluster_requires_its_token(workers):
    """Ray's servers were started to require one, and the driver does not pass it to processes that it starts later."""
    running = {
        process.pid: process for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"
    }
    (gcs,) = running.keys() & set(descendants(os.getpid()))
    environment = running[gcs].environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"} & set(os.environ)


async def test_shared_columns_are_read_only_views_of_one_memory(workers):
    num_tokens = 1_000_000
    index = np.arange(4)
    lengths = np.full(4, num_tokens // 8, np.int32)
    batch = Batch(
        index=index, group_index=index, rollout_id=index, credit_key=index, reward=np.arange(4.0),
        truncated=np.zeros(4, bool), prompt_length=lengths, response_length=lengths,
        tokens=np.arange(num_tokens, dtype=np.int32), mask=np.ones(num_tokens // 2, np.uint8),
        rollout_log_probs=np.full(num_tokens // 2, -0.5, np.float32), version=np.zeros(num_tokens // 2, np.int32),
    )  # fmt: skip
    columns = TokenColumns(advantages=np.linspace(0, 1, num_tokens, dtype=np.float32))
    before = plasma()
    shared = [workers.launcher.share(batch), workers.launcher.share(columns)]
    for reference, value in zip(shared, (batch, columns), strict=True):
        first, second = await asyncio.gather(*(engine.call("load_bucket", reference) for engine in workers.engines))
        arrays = {f.name: a for f in fields(value) if isinstance(a := getattr(value, f.name), np.ndarray)}
        assert first.keys() == second.keys() == arrays.keys()
        for name, array in arrays.items():
            if array.nbytes < 100_000:
                continue
            seen = first[name]
            assert seen["sum"] == array.astype(np.float64).sum()
            assert not seen["writeable"]
            assert not seen["owndata"]
            # The same bytes of the same file in both processes: no copy was made anywhere after `share`.
            assert seen["place"] == second[name]["place"]
            assert seen["place"][1] != "0"
    # tokens 4 MB, mask 0.5, rollout log-probs 2, versions 2, advantages 4: once each, however many read them.
    count, megabytes = plasma()
    assert count - before[0] == 2
    assert megabytes - before[1] == pytest.approx(12.5 * 1e6 / 2**20, abs=1)  # the raylet counts in whole MiB
    await asyncio.gather(*(engine.call("pause") for engine in workers.engines))


async def test_buckets_go_to_the_engines_as_references(workers):
    rank, other = workers.ranks
    (workers.folder / "export.json").write_text("[5, 200000]")
    drained = asyncio.create_task(collect(other.stream("export_weights", 5, 200_000)))
    sums = []
    async for bucket in rank.stream("export_weights", 5, 200_000):
        assert isinstance(bucket, ray.ObjectRef)
        await asyncio.sleep(0.2)
        ahead = int((workers.folder / "progress_0").read_text()) - len(sums)
        assert ahead <= 4
        seen = await asyncio.gather(*(engine.call("load_bucket", bucket) for engine in workers.engines))
        assert seen[0]["data"]["place"] == seen[1]["data"]["place"]
        sums.append(seen[0]["data"]["sum"])
    assert sums == [0.0, 200_000.0, 400_000.0, 600_000.0, 800_000.0]
    assert await drained == [None] * 5
    await asyncio.gather(*(engine.call("pause") for engine in workers.engines))


async def test_a_failing_export_fails_in_every_rank_that_drains_it(workers):
    (workers.folder / "export.json").write_text("[9, 10]")
    stream = workers.ranks[0].stream("export_weights", 9, 10)
    # One bucket is kept until the next one exists, so that the last one is marked.
    assert len([await anext(stream) for _ in range(4)]) == 4
    with pytest.raises(CheckpointError, match=r"^export stops$"):
        await anext(stream)
    with pytest.raises(CheckpointError, match=r"^export stops$"):
        await collect(workers.ranks[1].stream("export_weights", 9, 10))


async def test_a_cancelled_stream_does_not_block_its_rank(workers, tmp_path):
    (workers.folder / "export.json").write_text("[5, 10]")
    stream = workers.ranks[0].stream("export_weights", 5, 10)
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(20):
        await workers.ranks[0].call("save", tmp_path)


async def test_completions_stream_as_they_end_and_can_be_aborted(workers):
    engine = workers.engines[0]
    order = []
    async for completion in engine.generate(requests(60, 1, 6000, 1)):
        order.append(completion)
        if len(order) == 3:
            await engine.call("abort", ["r2"])
    assert sorted(c.request_id for c in order[:2]) == ["r1", "r3"]
    assert [c.request_id for c in order[2:]] == ["r0", "r2"]
    assert [c.finish_reason for c in order] == [FinishReason.STOP] * 3 + [FinishReason.ABORT]
    longest = next(c for c in order if c.request_id == "r3")
    assert longest.token_ids.tolist() == [3, 2, 1, 0]
    assert longest.token_ids.dtype == np.int32


async def test_a_cancelled_call_is_cancelled_in_the_engine(workers):
    stream = workers.engines[1].generate(requests(1, 6000))
    assert (await anext(stream)).request_id == "r0"
    await stream.aclose()
    await appears(workers.folder / "cancelled_r1")
    call = asyncio.create_task(workers.engines[0].call("commit_weights", 1))
    await appears(workers.folder / "began_commit")
    call.cancel()
    await appears(workers.folder / "cancelled_commit")


async def test_errors_keep_class_and_text_and_show_the_workers_traceback(workers, tmp_path):
    with pytest.raises(CheckpointError) as raised:
        await workers.ranks[1].call("save", tmp_path / "full")
    assert str(raised.value) == f"rank 1 cannot write {tmp_path / 'full'}"
    assert "fakes.py" in str(raised.value.__cause__)
    with pytest.raises(KeyError, match="missing"):
        await workers.ranks[0].call("save", tmp_path / "bug")
    with pytest.raises(EngineError, match=r"^seed 99 cannot be drawn$"):
        await collect(workers.engines[0].generate(requests(99)))


async def test_worker_with_another_version_refuses(workers, tmp_path):
    launcher = RayLauncher(RayConfig(), LauncherSetup())
    (spec,) = engine_specs(tmp_path, 1)
    other = replace(spec.agreement, versions=dict.fromkeys(spec.agreement.versions, "9.9"))
    with pytest.raises(PluginError, match=r"the driver 9\.9: install the same version on every machine"):
        await launcher.start_engines([replace(spec, agreement=other)])
    await launcher.stop()
    assert ray.is_initialized()


async def test_an_engine_that_was_prepared_is_the_one_that_starts(workers, tmp_path):
    """Not before the trainers have their devices, which it shares; and while their workers start."""
    launcher = RayLauncher(RayConfig(), LauncherSetup(colocate=True))
    specs = engine_specs(tmp_path, 2)
    preparing = asyncio.create_task(launcher.prepare_engines(specs))
    await asyncio.sleep(0.1)
    assert not preparing.done()
    ranks = await launcher.start_trainers(train_specs(tmp_path, meet=False))
    await asyncio.gather(preparing, *(rank.call("setup") for rank in ranks))
    prepared = [(tmp_path / f"prepared_{index}").read_text() for index in range(2)]
    engines, _ = await launcher.start_engines(specs)
    assert [str(await engine.call("version")) for engine in engines] == prepared
    assert len(launcher._groups) == 1
    # Another one in its place is a process of its own.
    other, _ = await launcher.restart_engine(1)
    assert str(await other.call("version")) not in prepared
    await launcher.stop()
    assert ray.is_initialized()


async def test_an_engine_that_was_prepared_is_stopped_without_a_start(workers, tmp_path):
    """The trainers have failed: its servers end before the launcher does."""
    launcher = RayLauncher(RayConfig(), LauncherSetup(colocate=True))
    preparing = asyncio.create_task(launcher.prepare_engines(engine_specs(tmp_path, 1)))
    (rank,) = await launcher.start_trainers(train_specs(tmp_path, meet=False, world_size=1))
    await asyncio.gather(preparing, rank.call("setup"))
    await launcher.stop()
    assert (tmp_path / "stopped_0").exists()


async def test_engines_do_not_wait_for_trainers_that_find_no_place(tmp_path, monkeypatch):
    def full():
        raise ConfigError("the cluster is full")

    launcher = RayLauncher(RayConfig(), LauncherSetup(colocate=True))
    monkeypatch.setattr(launcher, "_enter", full)
    preparing = asyncio.create_task(launcher.prepare_engines(engine_specs(tmp_path, 2)))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="the cluster is full"):
        await launcher.start_trainers(train_specs(tmp_path, meet=False))
    await asyncio.wait_for(preparing, 60)


async def test_workers_that_cannot_be_placed_are_a_config_error(workers, tmp_path):
    launcher = RayLauncher(RayConfig(num_cpus_per_worker=20_000), LauncherSetup(), placement_timeout_s=1.0)
    with pytest.raises(ConfigError) as raised:
        await launcher.start_trainers(train_specs(tmp_path, meet=False))
    assert "actor: asked Ray for 2 bundles of {CPU: 20000, GPU: 0}" in str(raised.value)
    assert "the cluster has {CPU: 10000, GPU: 0}" in str(raised.value)
    await launcher.stop()


async def test_a_failing_rank_is_raised_without_waiting_for_the_others():
    ranks = [Member(actor=None, name=f"rank {rank}", failure=TrainingError) for rank in range(3)]

    async def stuck():
        await asyncio.sleep(60)

    async def slow():
        await asyncio.sleep(0.05)
        return "in time"

    async def broken():
        raise RayTaskError("call", "remote traceback", CheckpointError("only I"))

    async def scene():
        crew, now = ActorGroup(Roster(), grace_s=0.2, shutdown_method="close"), asyncio.get_running_loop().time
        began = now()
        results = await asyncio.gather(
            *(crew.run(rank, work()) for rank, work in zip(ranks, (slow, stuck, broken), strict=True)),
            return_exceptions=True,
        )
        assert results[0] == "in time"
        assert [(type(result), str(result)) for result in results[1:]] == [(CheckpointError, "only I")] * 2
        assert now() - began == pytest.approx(0.2)
        with pytest.raises(CheckpointError, match="only I"):
            await crew.run(ranks[0], slow())

    # In a thread, since this one has a loop that runs.
    await asyncio.to_thread(run_fast, scene())


async def test_an_unawaited_failure_leaves_the_actor_group_usable():
    ranks = [Member(actor=None, name=f"rank {rank}", failure=TrainingError) for rank in range(2)]

    async def broken():
        raise RayTaskError("call", "remote traceback", CheckpointError("both of us"))

    async def well():
        await asyncio.sleep(0.05)
        return 1

    async def scene():
        crew = ActorGroup(Roster(), grace_s=0.1, shutdown_method="close")
        results = await asyncio.gather(*(crew.run(rank, broken()) for rank in ranks), return_exceptions=True)
        assert [str(result) for result in results] == ["both of us"] * 2
        await asyncio.sleep(0.3)
        assert await crew.run(ranks[0], well()) == 1

    await asyncio.to_thread(run_fast, scene())


async def test_ranks_in_another_call_do_not_wait_for_one_that_raised():
    """A checkpoint that cannot be written beside a step is written again later: the step continues."""
    first, second = (Member(actor=None, name=f"rank {rank}", failure=TrainingError) for rank in range(2))

    async def train():
        await asyncio.sleep(60)
        return "trained"

    async def written():
        raise RayTaskError("call", "remote traceback", CheckpointError("no space"))

    async def scene():
        crew = ActorGroup(Roster(), grace_s=0.2, shutdown_method="close")
        training = asyncio.create_task(crew.run(first, train(), "train"))
        with pytest.raises(CheckpointError, match="no space"):
            await crew.run(second, written(), "written")
        assert await training == "trained"
        assert not crew.has_died

    await asyncio.to_thread(run_fast, scene())


async def test_a_cancelled_stop_kills_all_workers_and_leaves_no_unhandled_error(monkeypatch):
    loop, unheard, killed = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda loop, context: unheard.append(context["message"]))
    farewell = loop.create_future()
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda method: farewell), _ray_actor_id=b"a")

    def kill(one):
        killed.append(one)
        loop.call_soon(lambda: farewell.done() or farewell.set_exception(RayActorError()))

    monkeypatch.setattr("slime_ray.actor_group.ray.kill", kill)
    monkeypatch.setattr("slime_ray.actor_group.GRACE_AFTER_FAILURE_S", 0.05)
    crew = ActorGroup(Roster(), grace_s=60, shutdown_method="stop")
    crew.add(Member(actor=actor, name="engine 1", failure=EngineError))
    crew.ready()
    ending = asyncio.create_task(crew.end())
    await asyncio.sleep(0.05)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert killed == [actor]
    # As the launcher does when the run ends.
    await crew.end(failed=True)
    del ending
    await asyncio.sleep(0.05)
    gc.collect()
    assert unheard == []


async def test_ranks_follow_nodes_and_devices():
    slots = [
        slot("10.0.0.10", "b", "1"), slot("10.0.0.9", "a", "10"), slot("10.0.0.10", "b", "0"), slot("10.0.0.9", "a", "2")
    ]  # fmt: skip
    bundles = by_device([one.location for one in slots])
    assert bundles == [3, 1, 2, 0]
    ordered = [slots[bundle] for bundle in bundles]
    assert [[s.location.devices[0] for s in part] for part in shares_of(ordered, 2, 2)] == [["2", "10"], ["0", "1"]]
    with pytest.raises(ConfigError, match="3 engines of 2 devices do not fit on the trainer's 4"):
        shares_of(ordered, 3, 2)
    with pytest.raises(ConfigError, match="would be on two machines"):
        shares_of(ordered, 1, 3)


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_is_dead_or_hangs_is_replaced(workers, signal_sent):
    """The new engine has the same place and spec; the other engine and the trainers are not affected."""
    engine, neighbour = workers.engines
    pid = await engine.call("version")
    on_roster = len(workers.launcher._roster.members)
    if signal_sent is signal.SIGKILL:
        stream = engine.generate(requests(6000))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        os.kill(pid, signal_sent)
        with pytest.raises(EngineError, match=rf"engine 0 \(node 127.0.0.1, pid {pid}\) is gone"):
            await waiting
    else:
        os.kill(pid, signal_sent)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.call("version"), 1)
        await workers.launcher.end_engine(0)
        # It has exited, not only been asked to: its memory is free.
        assert not is_alive(pid)
    groups = len(ray.util.placement_group_table())
    began = time.monotonic()
    successor, info = await workers.launcher.restart_engine(0)
    # Where Ray has no place for it, that takes a minute.
    assert time.monotonic() - began < 50
    workers.engines = [successor, neighbour]
    await gone([pid])
    assert info.pid == await successor.call("version") != pid
    (completion,) = await collect(successor.generate(requests(1)))
    assert completion.engine_index == 0
    assert await neighbour.call("version") != info.pid
    assert len(ray.util.placement_group_table()) == groups
    assert len(workers.launcher._roster.members) == on_roster
    # Calls of the dead engine still fail, and at once.
    if signal_sent is signal.SIGKILL:
        with pytest.raises(EngineError, match=f"pid {pid}"):
            await engine.call("version")


@pytest.mark.parametrize(
    ("signal_sent", "here"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGSTOP, False)]
)
async def test_an_engine_has_ended_when_the_process_that_serves_has(workers, tmp_path, signal_sent, here, monkeypatch):
    """It holds the memory, and hears of its actor's end after Ray does; nothing at all if it is stopped. `here`: or on another
    machine than the driver's, where Ray is asked."""
    monkeypatch.setattr(Member, "is_here", here)
    (tmp_path / "slow_to_go").touch()
    (spec,) = engine_specs(tmp_path, 1)
    spec = replace(spec, setup=replace(spec.setup, index=3))
    (engine,), (info,) = await workers.launcher.start_engines([spec])
    actor = await engine.call("version")
    assert actor != info.pid
    os.kill(actor, signal_sent)
    if signal_sent is signal.SIGSTOP:
        os.killpg(info.pid, signal_sent)
    first, second = json.loads((tmp_path / "servers.json").read_text())
    assert first == info.pid
    await workers.launcher.end_engine(3)
    assert [is_alive(pid) for pid in (actor, first, second)] == [False] * 3


@pytest.mark.parametrize("here", [True, False])
async def test_an_engine_that_starts_has_ended_when_its_servers_have(workers, tmp_path, here, monkeypatch):
    monkeypatch.setattr(Member, "is_here", here)
    for name in ("slow_to_go", "starts_long"):
        (tmp_path / name).touch()
    (spec,) = engine_specs(tmp_path, 1)
    starting = asyncio.create_task(workers.launcher.start_engines([replace(spec, setup=replace(spec.setup, index=4))]))
    await appears(tmp_path / "starts", starting)
    servers = json.loads((tmp_path / "servers.json").read_text())
    await workers.launcher.end_engine(4)
    assert [is_alive(pid) for pid in servers] == [False] * 2
    with pytest.raises(EngineError, match="engine 4"):
        await starting


async def test_an_engine_over_two_machines_starts_and_ends_as_one(workers, tmp_path):
    (spec,) = engine_specs(tmp_path, 1)
    setup = replace(spec.setup, index=2, num_devices=2, num_nodes=2)
    (engine,), (info,) = await workers.launcher.start_engines([replace(spec, setup=setup)])

    def reports():
        return [json.loads((tmp_path / f"machine_{rank}.json").read_text()) for rank in range(2)]

    first, beside = reports()
    assert info.pid == first["pid"] == await engine.call("version") != beside["pid"]
    assert {first["host"], beside["host"]} == {"127.0.0.1"}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", first["rendezvous"])
    assert first["rendezvous"] == beside["rendezvous"]
    await engine.call("health")
    os.kill(beside["pid"], signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"engine 2, machine 1 \(node 127.0.0.1, pid {beside['pid']}\) is gone"):
        await engine.call("health")
    successor, _ = await workers.launcher.restart_engine(2)
    await gone([first["pid"], beside["pid"]])
    await successor.call("health")
    assert {machine["pid"] for machine in reports()}.isdisjoint({first["pid"], beside["pid"]})


async def test_a_rank_that_hangs_is_an_error_in_time_and_has_ended_after_the_stop(workers, tmp_path):
    """On a cluster that continues: no one else ends what is stopped, and it would keep its memory."""
    launcher = RayLauncher(RayConfig(), LauncherSetup(), grace_s=0.5)
    (rank,) = await launcher.start_trainers(train_specs(tmp_path, meet=False, world_size=1))
    await rank.call("setup")
    await rank.call("save", tmp_path)
    pid = json.loads((tmp_path / "0.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    (one,) = limited([rank], "actor", 1.0)
    with pytest.raises(RankTimeout, match=r"^trainer actor, rank 0 in save \(of 1\): not ended within 1 s\."):
        await one.call("save", tmp_path)
    await launcher.stop()
    assert not is_alive(pid)
    assert ray.is_initialized()


async def test_a_death_fails_all_ranks_at_once_and_stop_does_not_wait(workers, tmp_path):
    """The last test with these workers: it stops them."""
    await asyncio.gather(*(rank.call("save", tmp_path) for rank in workers.ranks))
    pids = [json.loads((tmp_path / f"{rank}.json").read_text())["pid"] for rank in range(2)]
    began = time.monotonic()
    calls = [rank.call("save", tmp_path / "die-1") for rank in workers.ranks]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, TrainingError)
        assert f"trainer actor, rank 1 of 2 (node 127.0.0.1, pid {pids[1]}) is gone" in str(result)
        assert "last words" in str(result)
    with pytest.raises(TrainingError, match="rank 1 of 2"):
        await workers.ranks[0].call("save", tmp_path)
    # Rank 0 sleeps for five minutes; the run does not wait for it.
    processes = [pid for pid in descendants(os.getpid()) if pid not in workers.others]
    assert pids[0] in processes
    await workers.launcher.stop()
    assert time.monotonic() - began < 45
    await gone(processes)
    # The log that the error quotes is kept.
    log = Path(str(result).partition("Last lines of ")[2].partition(":")[0])
    assert "last words" in log.read_text()
    shutil.rmtree(log.parents[3])
    assert (workers.folder / "stopped_0").exists()
    assert not (workers.folder / "closed_0").exists()


async def test_an_address_without_a_cluster_is_a_config_error():
    with pytest.raises(ConfigError, match=r'^launcher.address = "127.0.0.1:1": no Ray cluster responds there'):
        RayCluster.join("127.0.0.1:1")
    with pytest.raises(ConfigError, match="not a Ray client"):
        RayCluster.join("ray://127.0.0.1:10001")


async def test_without_ray_the_error_names_the_package_to_install(monkeypatch):
    assert RayDriver.problems(RayConfig()) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    assert RayDriver.problems(RayConfig()) == ['launcher.name = "ray": Ray is not installed: pip install slime-ray.']


async def test_ctrl_c_leaves_the_workers_to_the_driver(tmp_path):
    """A run of its own in its own session: SIGINT reaches its whole process group, as a terminal sends it."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(folder=str(tmp_path), tests=str(Path(__file__).parent)))
    pipe = asyncio.subprocess.PIPE
    driver = await asyncio.create_subprocess_exec(
        sys.executable, str(script), start_new_session=True, stdout=pipe, stderr=pipe
    )
    output = asyncio.create_task(driver.communicate())
    try:
        await appears(tmp_path / "ready", unless=output)
        processes = descendants(driver.pid)
        assert len(processes) >= 6
        os.killpg(driver.pid, signal.SIGINT)
        out, err = (text.decode() for text in await asyncio.wait_for(output, 60))
    finally:
        if driver.returncode is None:
            driver.kill()
    assert (driver.returncode, err) == (0, "")
    # Both completions, and one placement group: the engine shares the trainer's.
    assert "saved after interrupt 2 1" in out
    assert (tmp_path / "0.json").exists()
    assert (tmp_path / "closed_0").exists()
    assert (tmp_path / "stopped_0").exists()
    await gone(processes)
    assert not Path(out.split("folder ")[1].strip()).exists()


DRIVER = """
import asyncio, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_ray_launcher as t

folder = Path({folder!r})

async def main():
    interrupted = asyncio.Event()
    launcher = t.RayLauncher(t.RayConfig(), t.LauncherSetup(colocate=True))
    try:
        ranks, (engines, _) = await asyncio.gather(
            launcher.start_trainers(t.train_specs(folder, meet=False, world_size=1)),
            launcher.start_engines(t.engine_specs(folder, 1)),
        )
        await ranks[0].call("setup")
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        (folder / "ready").touch()
        await interrupted.wait()
        await asyncio.sleep(1)
        await ranks[0].call("save", folder)
        completions = await t.collect(engines[0].generate(t.requests(1, 1)))
        print("saved after interrupt", len(completions), len(t.ray.util.placement_group_table()))
        print("folder", launcher._cluster.folder)
    finally:
        await launcher.stop()

asyncio.run(main())
"""


def slot(ip: str, node: str, device: str) -> Slot:
    process = StartedProcess(pid=1, started=0.0)
    return Slot(group=None, bundle=0, location=Location(node=node, ip=ip, process=process, devices=(device,), log=None))


async def collect(stream) -> list:
    return [item async for item in stream]


def plasma() -> tuple[int, float]:
    """Objects and MiB in the node's object store, as the raylet counts them."""
    summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    line = next(line for line in summary.splitlines() if line.startswith("Plasma memory usage"))
    words = line.split()
    return int(words[words.index("objects,") - 1]), float(words[3])


def descendants(pid: int) -> list[int]:
    """`pid` and its descendants; psutil skips those that end meanwhile."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        await asyncio.sleep(0.1)


async def appears(path: Path, unless: asyncio.Task | None = None) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert unless is None or not unless.done(), unless.result()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
