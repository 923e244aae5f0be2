"""What of a trainer's memory is offloaded while it sleeps, and where."""

import pytest
import torch
from torch import Tensor

from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import ADAM, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CASES = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "bfloat16, moments too": {"bf16": True, **MOMENTS},
    "nothing in float32": {"bf16": True, "main_params_dtype": "bf16", **MOMENTS},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(model=make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def state_of(trainer) -> list[Tensor]:
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    of_each = [state for part in parts for state in part.optimizer.state.values()]
    return [value for state in of_each for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_host_memory_for_the_moments_is_there_before_the_first_step(options, place):
    """Else the sleep after the first step would wait until it is locked, for many seconds."""
    training = TrainingBatch.make()
    with opened(Megatron.build(Megatron.Config(**options)), place, optimizer=ADAM) as one:
        one.backend.sleep()
        trainer = one.backend._ready
        kept = trainer.residency._parking._moments._memory
        kept.room(0)
        reserved = kept._memory
        one.backend.wake_up()
        assert not one.backend.train_step(training.micros(), objective_of()).skipped
        state = state_of(trainer)
        size = sum(value.nbytes for value in state)
        assert size > sum(weight.nbytes for weight in trainer.tensors.values()), "two moments of each"
        assert size < len(reserved) < 2 * size, "beside small tensors, whose bytes are rounded up"
        before = [value.clone() for value in state]
        one.backend.sleep()
        assert kept._memory is reserved
        assert not any(value.untyped_storage().nbytes() for value in state)
        one.backend.wake_up()
        assert kept._memory is reserved
        assert all(torch.equal(value, old) for value, old in zip(state, before, strict=True))
