"""The trainers' state and the engines' weights in folders of one's own: continued to the bit, begun again, served by engines
that were restarted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import slime_core
from slime_core.errors import CheckpointError, ConfigError, StorageError, TrainingError
from slime_core.types.completion import SamplingParams
from slime_session import Datum, TrainingSession

if TYPE_CHECKING:
    from conftest import TinyRun

SET: Mapping[str, Any] = {
    "rollout.rollout_batch_size": 4,
    "rollout.rollout_max_response_len": 8,
    "rollout.use_fault_tolerance": True,
    "rollout.rollout_health_check_interval": 0.1,
}
PROMPTS = [[5, 9, 2], [7], [11, 4, 8, 6, 3], [12, 13]]


@pytest.fixture(scope="module")
def tiny(make_tiny: Callable[[Path], TinyRun], tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny(tmp_path_factory.mktemp("states"))


@pytest.fixture
def opened(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingSession]:
    monkeypatch.chdir(tiny.folder)
    return lambda name, **overrides: slime_core.open_session(
        "run.toml", overrides={**SET, "name": name, **overrides}, fresh=True
    )


def datums(turn: int) -> list[Datum]:
    draw = np.random.default_rng(turn)
    return [
        Datum(tokens=draw.integers(3, 14, length), prompt_length=2, loss_weights=[0.1] * (length - 2))
        for length in (9, 5)
    ]


def trained(session: TrainingSession, turns: range) -> bytes:
    """Log-probs after one optimizer step for each turn."""
    for turn in turns:
        session.forward_backward(session.batch(datums(turn)), loss="sft")
        assert not session.optim_step(lr=0.01).skipped
    return log_probs(session)


def log_probs(session: TrainingSession) -> bytes:
    return session.forward(session.batch(datums(9))).tobytes()


def generated(session: TrainingSession) -> list[list[int]]:
    found = session.generate(PROMPTS, SamplingParams(max_new_tokens=6), seeds=range(4))
    return [one.token_ids.tolist() for one in found]


def continued(session: TrainingSession, folder: Path) -> None:
    start, drawn = log_probs(session), generated(session)
    saved = trained(session, range(2))
    session.save_state(folder / "state")
    session.save_weights(folder / "weights")
    after = trained(session, range(2, 4))
    assert after != saved != start
    session.load_state(folder / "state")
    assert log_probs(session) == saved
    session.forward_backward(session.batch(datums(8)), loss="sft")
    # Gradients are dropped.
    session.load_state(folder / "state")
    assert trained(session, range(2, 4)) == after
    session.load_state(folder / "state", optimizer=False)
    assert log_probs(session) == saved
    assert trained(session, range(2, 4)) != after
    assert generated(session) == drawn
    version = session.version
    session.load_weights(folder / "weights")
    assert session.version > version
    assert generated(session) != drawn
    session.restart()
    assert log_probs(session) == start
    assert trained(session, range(2)) == saved


def test_states_are_continued_to_the_bit(opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("states") as session:
        continued(session, tmp_path)
        session.update_weights()
        expected = generated(session)
        trained(session, range(2, 4))
        session.load_weights(tmp_path / "weights")
        assert generated(session) == expected, "the folder has what the trainers had after two steps"
        with pytest.raises(
            ConfigError, match=r"engines sample with .*weights, and one that is restarted would read other"
        ):
            session.save_weights(tmp_path / "weights")
        client = session._session.client
        assert client is not None
        engine = client.engine(0)
        assert engine is not None
        session._live.do(lambda: engine.call("stop"))
        assert generated(session) == expected
        assert client.engine(0) is not engine
        session.update_weights()
        assert generated(session) != expected
        session.forward_backward(session.batch(datums(0)), loss="sft")
        for call in (session.save_state, session.save_weights):
            with pytest.raises(TrainingError, match="call optim_step first"):
                call(tmp_path / "inside")
        (tmp_path / "weights/weights.json").unlink()
        with pytest.raises(CheckpointError, match="not a complete folder"):
            session.load_weights(tmp_path / "weights")


def test_a_checkpoint_has_the_state_that_was_loaded(opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("replaced") as session:
        session.save_state(tmp_path / "best")
        best = log_probs(session)
        later = trained(session, range(2))
        path = session.save()
        session.load_state(tmp_path / "best")
        assert session.save() == path
        assert session.save() == path
        step = session.step
    name = {**SET, "name": "replaced"}
    with slime_core.open_session("run.toml", overrides=name) as session:
        assert (session.step, log_probs(session)) == (step, best)
        assert trained(session, range(2)) == later


def test_a_state_that_cannot_be_written_leaves_the_earlier_one(
    opened: Callable[..., TrainingSession], tmp_path: Path
) -> None:
    with opened("broken") as session:
        session.save_state(tmp_path / "state")
        session.save_weights(tmp_path / "weights")
        saved = log_probs(session)
        trained(session, range(1))
        for folder in ("state", "weights"):
            # A file where the new folder would be.
            (tmp_path / f".{folder}.writing").write_text("")
        for call in (session.save_state, session.save_weights):
            with pytest.raises(StorageError, match="cannot be written"):
                call(tmp_path / ("state" if call == session.save_state else "weights"))
        session.load_weights(tmp_path / "weights")
        session.load_state(tmp_path / "state")
        assert log_probs(session) == saved


def test_adapters_have_their_own(opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("adapters", **{"backend.max_adapters": 1}) as session:
        with pytest.raises(ConfigError, match="frozen"):
            session.restart()
        adapter = session.add_adapter("a", rank=2, seed=1)
        copy = adapter.copy()
        adapter.forward_backward(session.batch(datums(0)), loss="sft")
        adapter.optim_step(lr=0.01)
        copy.write(tmp_path / "a")
        batch = session.batch(datums(9))
        again = adapter.forward(batch)
        adapter.remove()
        before = session.load_adapter("a", tmp_path / "a", optimizer=True)
        assert before.step == 0
        assert (before.forward(batch) != again).any()


@pytest.mark.ray
def test_with_two_ranks_under_ray(opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("ray", launcher={"name": "ray", "actor_num_gpus_per_node": 2}) as session:
        continued(session, tmp_path)
