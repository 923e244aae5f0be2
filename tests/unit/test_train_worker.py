"""TrainWorker: what a rank does around its backend."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.config.part import PluginSpec
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_core.contracts.transport import SenderSetup
from slime_core.registry import Registry
from slime_core.registry.plugin_file import PluginFile
from slime_core.types.batch import TokenColumns
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_format import EngineFormat
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.train_worker import TrainWorker, TrainWorkerSpec

PLUGIN = """
from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.converter import ConverterDriver, TensorFormat
from slime_core.contracts.transport import TransportDriver, WeightSender
from slime_core.plugin import driver, loss
from slime_core.types.report import StepReport


class Backend:
    def setup(self, setup):
        self.folder = setup.model_path
        return Layout(dp_rank=0, dp_size=1)

    def begin_rollout(self, rollout_id):
        (self.folder / "rollout").write_text(str(rollout_id))

    def train_step(self, micros, objective):
        (self.folder / "steps").write_text(str(len(micros)))
        return StepReport(nonfinite="weight a is not finite" if len(micros) == 2 else None)

    def stage(self, folder):
        return (self.folder / "written").touch

    def export_weights(self, *, all_ranks=False):
        for name in ("a", "b", "c"):
            yield {name: float(all_ranks)}
        yield None
        (self.folder / "exhausted").touch()

    def frozen_tensors(self):
        return frozenset({"a"})

    def close(self):
        (self.folder / "closed").touch()


@driver("slime.backends", "fake")
class FakeBackend(BackendDriver):
    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout(dp_rank=0, dp_size=1)

    @classmethod
    def build(cls, config):
        return Backend()


class Sender(WeightSender):
    def setup(self, setup):
        (setup.run_dir / "frozen").write_text(" ".join(sorted(setup.frozen)))

    def send(self, export, version, engines):
        layers = export(all_ranks=True)
        try:
            next(layers), next(layers)
        except ValueError:
            rest = list(layers)
            assert rest == [{"c": 1.0, "c_scale": 1.0}, None]
            raise

    def close(self):
        raise OSError("the folder is busy")


@driver("slime.transports", "fake")
class FakeTransport(TransportDriver):
    @classmethod
    def build_sender(cls, config):
        return Sender()

    @classmethod
    def build(cls, config): ...


class Scaled(TensorFormat):
    def names(self, name):
        return name, name + "_scale"

    def converted(self, tensors):
        if "b" in tensors:
            raise ValueError("b has no scale")
        return {part: tensor for name, tensor in tensors.items() for part in self.names(name)}


@driver("slime.converters", "fake")
class FakeConverter(ConverterDriver):
    @classmethod
    def tensor_format(cls, folder):
        return Scaled()

    @classmethod
    def build(cls, config): ...


@loss("fake")
def fake(inputs, segments): ...
"""


def part(kind):
    return PluginSpec(group=f"slime.{kind}", name="fake", options={})


@pytest.fixture
def spec(tmp_path):
    file = PluginFile(path=Path("ranks.py"), text=PLUGIN, sha256="e" * 64)
    parts = [part(kind) for kind in ("backends", "transports", "losses", "converters")]
    return TrainWorkerSpec(
        agreement=Agreement.of([one.resolve(Registry([file])) for one in parts], [file]),
        backend=parts[0],
        transport=parts[1],
        engine_format=EngineFormat(converter=parts[3], folder=tmp_path),
        sender=SenderSetup(
            rank=0, world_size=1, device="cpu", model_path=tmp_path, run_dir=tmp_path, colocated=False
        ),
        objective=ObjectiveSpec(
            loss=parts[2], kl=None, kl_loss_coef=0.0, use_unbiased_kl=False, entropy_coef=0.0, corrections=(),
            old_from_current=False, old_from_rollout=False,
        ),
        temperature=1.0,
        setup=TrainerSetup(
            role="actor", rank=0, world_size=1, local_rank=0, rendezvous="", device="cpu", model_path=tmp_path,
            optimizer=OptimizerConfig(), total_steps=1, seed=0,
        ),
    )  # fmt: skip


@pytest.fixture
def worker(spec):
    worker = TrainWorker(spec)
    worker.setup()
    return worker


def test_no_optimizer_step_follows_one_that_left_weights_that_are_not_finite(worker, tmp_path, make_batch):
    batch, columns = make_batch([(1, 2)]), TokenColumns(loss_weight=np.ones(2, np.float32))
    one, nothing = np.array([0]), np.array([], np.int64)
    reports = worker.train(batch, columns, [[one], [one, nothing], [one, nothing, nothing]], 7)
    assert [report.nonfinite for report in reports] == [None, "weight a is not finite"]
    assert (tmp_path / "steps").read_text() == "2"
    assert (tmp_path / "rollout").read_text() == "7"


def test_a_sender_that_cannot_close_leaves_nothing_else_open(worker, tmp_path):
    """Other ranks wait for a process group that is not destroyed; a checkpoint under way would be incomplete."""
    worker.stage(tmp_path)
    with pytest.raises(OSError, match="the folder is busy"):
        worker.close()
    assert (tmp_path / "written").exists()
    assert (tmp_path / "closed").exists()
    with pytest.raises(RuntimeError, match="after shutdown"):
        worker.stage(tmp_path)


def test_a_failing_conversion_for_the_engines_does_not_block_other_ranks(worker, tmp_path):
    """Gathering is collective: an export is exhausted also after an error."""
    assert (tmp_path / "frozen").read_text() == "a a_scale"
    with pytest.raises(ValueError, match="b has no scale"):
        worker.send_weights(1, [])
    assert (tmp_path / "exhausted").exists()


def test_the_thread_that_writes_beside_training_uses_the_gpu_of_its_rank(spec, tmp_path, monkeypatch):
    """CUDA's current device is each thread's own: it would be GPU 0 in that of every rank of the machine."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    for device in ("cuda", "cpu"):
        worker = TrainWorker(replace(spec, transport=None, setup=replace(spec.setup, device=device, local_rank=3)))
        worker.setup()
        worker.stage(tmp_path)
        worker.close()
        assert worker.written()
    ((number, thread),) = chosen
    assert number == 3
    assert thread is not threading.current_thread()
