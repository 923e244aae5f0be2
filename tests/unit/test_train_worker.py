"""What a rank does beside its backend."""

from pathlib import Path

import pytest

from slime_core.config.bound import PartSpec
from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import TrainerSetup
from slime_core.plugin_file import PluginFile
from slime_core.registry import Registry
from slime_core.workers.agreement import Agreement
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.trainer import TrainWorker, TrainWorkerSpec

PLUGIN = """
from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.transport import TransportDriver, WeightSender
from slime_core.plugin import driver, loss


class Backend:
    def setup(self, setup):
        self.folder = setup.model_path
        return Layout(dp_rank=0, dp_size=1)

    def stage(self, folder):
        return (self.folder / "written").touch

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
    def setup(self, setup): ...

    def send(self, export, version, engines): ...

    def close(self):
        raise OSError("the folder is busy")


@driver("slime.transports", "fake")
class FakeTransport(TransportDriver):
    @classmethod
    def build_sender(cls, config):
        return Sender()

    @classmethod
    def build(cls, config): ...


@loss("fake")
def fake(inputs, segments): ...
"""


def part(kind):
    return PartSpec(group=f"slime.{kind}", name="fake", options={})


@pytest.fixture
def worker(tmp_path):
    file = PluginFile(path=Path("ranks.py"), text=PLUGIN, sha256="e" * 64)
    parts = [part(kind) for kind in ("backends", "transports", "losses")]
    spec = TrainWorkerSpec(
        agreement=Agreement.of([one.resolve(Registry([file])) for one in parts], [file]),
        backend=parts[0],
        transport=parts[1],
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
    worker = TrainWorker(spec)
    worker.setup()
    return worker


def test_a_sender_that_cannot_close_leaves_nothing_else_open(worker, tmp_path):
    """A process group that is not left keeps others waiting; a checkpoint under way would be cut off."""
    worker.stage(tmp_path)
    with pytest.raises(OSError, match="the folder is busy"):
        worker.close()
    assert (tmp_path / "written").exists()
    assert (tmp_path / "closed").exists()
    with pytest.raises(RuntimeError, match="after shutdown"):
        worker.stage(tmp_path)
