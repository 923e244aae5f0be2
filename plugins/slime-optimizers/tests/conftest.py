"""Steps of an optimizer on tensors or shards, steps of the backend fsdp on a tiny model, and two ranks that do both."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import Place, TrainingBatch, objective_of

KEYS = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0}
SHAPES = {
    "tall": ((50, 32), True),
    "wide": ((33, 64), True),
    "equal": ((50, 32), True),
    "one row": ((1, 96), True),
    "embedding": ((37, 32), False),
    "norm": ((7,), False),
}
"""Shape, and whether it is a matrix of a layer. Two ranks have different numbers of rows, or one of them has all."""
OPTIONS = {"muon": {}, "adamw_8bit": {"adamw_8bit_min_elements": 1}}
OPTIMIZERS = list(OPTIONS)


def driver_of(name):
    return entry_points(group="slime.optimizers")[name].load()


def keys_of(name):
    return OptimizerConfig(optimizer=name, **KEYS)


class Stepped:
    """Parameters of `SHAPES`, on the ranks of a mesh or whole, with an optimizer."""

    shapes = SHAPES

    def __init__(self, name, mesh=None, dtype=torch.float32, **options):
        self.driver, self._mesh = driver_of(name), mesh
        self.parameters = {
            of: torch.nn.Parameter(self.placed(value.to(dtype))) for of, value in self.drawn(100).items()
        }
        groups = [
            {
                "params": [p for of, p in self.parameters.items() if kind(of) == (hidden, vector)],
                "weight_decay": 0.0 if vector else 0.1,
                "hidden": hidden,
            }
            for hidden, vector in ((True, False), (False, False), (False, True))
        ]
        config = self.driver.Config(**(OPTIONS[name] | options))
        self.optimizer = self.driver.build(config)(groups, keys_of(name))

    @staticmethod
    def drawn(seed):
        noise = torch.Generator().manual_seed(seed)
        return {of: torch.randn(shape, generator=noise) for of, (shape, _) in SHAPES.items()}

    def placed(self, value):
        return value if self._mesh is None else distribute_tensor(value, self._mesh, [Shard(0)])

    def step(self, first, count, lr=0.01):
        """Gradients follow from the number of the step."""
        for number in range(first, first + count):
            for of, gradient in self.drawn(number).items():
                parameter = self.parameters[of]
                parameter.grad = self.placed(gradient.to(parameter.dtype))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()

    def values(self):
        return {of: whole(parameter) for of, parameter in self.parameters.items()}

    def states(self):
        return {
            f"{key} of {of}": whole(value)
            for of, parameter in self.parameters.items()
            for key, value in self.driver.state_of(self.optimizer, parameter).items()
        }


def kind(of):
    shape, hidden = SHAPES[of]
    return hidden, len(shape) == 1


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


class Trained:
    """The backend fsdp on the tiny model, with an optimizer."""

    def __init__(self, name, place: Place, **setup):
        driver, fsdp = driver_of(name), entry_points(group="slime.backends")["fsdp"].load()
        chosen = ChosenOptimizer(driver=driver, options=driver.Config(**OPTIONS[name]))
        self.backend = fsdp.build(fsdp.Config())
        self.backend.setup(place.setup(**({"optimizer": keys_of(name), "chosen_optimizer": chosen} | setup)))
        self._batch = TrainingBatch.make()
        self._mine = slice(place.rank, None, place.world_size)

    def train(self, count):
        """Whole steps; each rank has every second micro-batch."""
        micros = self._batch.micros(((0, 1), (2, 3), (4, 5), (6, 7)))[self._mine]
        return [self.backend.train_step(micros, objective_of()) for _ in range(count)]

    def weights(self):
        """Empty on every rank but the first."""
        return {
            name: tensor.clone() for layer in self.backend.export_weights() for name, tensor in (layer or {}).items()
        }


def different(one, other):
    """Names of the tensors that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(name="stepped")
def stepped_fixture():
    return Stepped


@pytest.fixture(name="different")
def different_fixture():
    return different


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def begin(tiny):
    """Backends that are closed with the test."""
    begun = []

    def begin(name, **setup):
        begun.append(Trained(name, Place(model=tiny), **setup))
        return begun[-1]

    yield begin
    for trained in begun:
        trained.backend.close()


@pytest.fixture(scope="session")
def ranks(tiny, tmp_path_factory):
    """What both ranks of two_ranks.py saved, as `ranks(NAME)`."""
    out = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(out), str(tiny)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return lambda name: [torch.load(out / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
