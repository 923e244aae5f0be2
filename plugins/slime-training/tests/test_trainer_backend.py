"""What backends do alike: their trainer, its frozen copies, the entropy of a step, scores of a micro-batch."""

import math
from types import SimpleNamespace

import pytest
import torch

from slime_core.contracts.backend import Layout
from slime_core.errors import CheckpointError, ModelError
from slime_training.finite_state import StateTensor
from slime_training.frozen_copies import require_copy
from slime_training.head import requested_entropy
from slime_training.scores import scores_of
from slime_training.trainer_backend import TrainerBackend


class Ranks:
    left = 0

    def leave(self):
        self.left += 1


class Backend(TrainerBackend):
    """The rest of the contract is the suites'."""

    weight = torch.ones(2)

    def _weights(self):
        yield StateTensor(name="weight a", tensor=self.weight)

    def _moments(self):
        yield StateTensor(name="exp_avg of a", tensor=torch.tensor([0.0, math.nan]))

    def _load(self, folder):
        pass


Backend.__abstractmethods__ = frozenset()


def test_a_trainer_from_setup_to_close():
    ranks = Ranks()
    backend = Backend(lambda setup: SimpleNamespace(layout=Layout(dp_rank=setup), ranks=ranks))
    with pytest.raises(RuntimeError, match="call setup first"):
        _ = backend._ready
    backend.close()
    assert backend.setup(3) == Layout(dp_rank=3) == backend._ready.layout
    backend.close()
    backend.close()
    assert ranks.left == 1
    with pytest.raises(RuntimeError, match="call setup first"):
        _ = backend._ready


def test_what_the_allocator_caches_is_freed(monkeypatch):
    """After setup, before engines start beside it, and on request. Buckets that readers have closed come first: only
    then is their memory cached."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("closed"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cached"))
    backend = Backend(lambda setup: SimpleNamespace(layout=Layout(), ranks=Ranks()))
    backend.setup(None)
    assert calls == ["closed", "cached"]
    backend.free_cache()
    assert calls == ["closed", "cached"] * 2


def test_a_folder_or_checkpoint_that_is_not_finite_is_refused():
    place = {"layout": Layout(), "ranks": Ranks()}
    backend = Backend(lambda setup: SimpleNamespace(**place))
    backend.weight = torch.tensor([1.0, math.inf])
    with pytest.raises(ModelError, match="base: weight a is not finite, so it cannot be trained"):
        backend.setup(SimpleNamespace(model_path="base"))
    backend.weight = torch.ones(2)
    backend.setup(None)
    with pytest.raises(
        CheckpointError, match=r"step_4: exp_avg of a is not finite\. Resume from an older .* --ckpt-step"
    ):
        backend.load("step_4")


def test_copies_by_name():
    require_copy("reference", ["reference", "teacher"])
    with pytest.raises(ModelError, match=r'weights = "refrence": unknown copy of this trainer.*actor, reference'):
        require_copy("refrence", ["reference"])


@pytest.mark.parametrize(
    ("needs", "has_gradient", "mode"),
    [(False, False, "none"), (True, False, "metric"), (True, True, "gradient"), (False, True, "gradient")],
)
def test_entropy_of_a_step(needs, has_gradient, mode):
    assert requested_entropy(SimpleNamespace(needs_entropy=needs, entropy_has_gradient=has_gradient)) == mode


def test_scores_of_a_micro_batch():
    columns = {"log_probs": torch.tensor([-1.0, -2.0]), "entropy": torch.tensor([0.5, 0.25])}
    whole = scores_of(SimpleNamespace(rows=None), columns)
    assert whole.log_probs.tolist() == [-1.0, -2.0]
    assert whole.entropy.tolist() == [0.5, 0.25]
    assert (whole.values, whole.rows) == (None, None)
    assert scores_of(SimpleNamespace(rows=torch.tensor([4, 7])), columns).rows.tolist() == [4, 7]
