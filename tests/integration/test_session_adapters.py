"""Several adapters in one session: each alone beside all together to the bit, snapshots while training continues, the engine
beside the trainer, files, refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import slime_core
from slime_core.errors import CheckpointError, ConfigError, DataError, EngineRefused, ModelError, TrainingError
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_core.types.sample import Status
from slime_session import Adapter, Datum, Snapshot, TrainingSession

if TYPE_CHECKING:
    from conftest import TinyRun

SET: Mapping[str, Any] = {
    "backend.max_adapters": 3,
    "rollout.rollout_batch_size": 8,
    "rollout.rollout_max_response_len": 8,
    "train.lr": 0.01,
    "train.clip_grad": 0.5,
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "a": {"rank": 4, "alpha": 8, "seed": 1},
    "b": {"rank": 2, "seed": 2, "mlp": False},
    "c": {"rank": 3, "seed": 3, "unembedding": False},
}
SAMPLING = SamplingParams(max_new_tokens=6)
PROMPTS = [[5, 9, 2], [7], [11, 4, 8, 6, 3], [12, 13]]


@pytest.fixture(scope="module")
def tiny(make_tiny: Callable[[Path], TinyRun], tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def opened(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingSession]:
    monkeypatch.chdir(tiny.folder)

    def open_(name: str, overrides: Mapping[str, Any] | None = None) -> TrainingSession:
        session = slime_core.open_session("run.toml", overrides={**SET, "name": name, **(overrides or {})}, fresh=True)
        assert isinstance(session, TrainingSession)
        return session

    return open_


def datums(seed: int, turn: int) -> list[Datum]:
    draw = np.random.default_rng([seed, turn])
    return [
        Datum(
            tokens=draw.integers(3, 14, length),
            prompt_length=2,
            advantages=draw.normal(size=length - 2).astype(np.float32),
            log_probs=-2 * np.ones(length - 2, np.float32),
            loss_weights=np.full(length - 2, 0.1, np.float32),
        )
        for length in (9, 5, 12)
    ]


def bits(completions: Sequence[Completion]) -> list[tuple[bytes, bytes]]:
    return [(one.token_ids.tobytes(), one.log_probs.tobytes()) for one in completions]


def steps(session: TrainingSession, adapter: Adapter, seed: int) -> Iterator[tuple[Any, ...]]:
    """Two optimizer steps, and what they and samples are like; something else may happen at each yield."""
    for turn in range(2):
        snapshot = adapter.snapshot()
        batch = session.batch(datums(seed, turn))
        first = adapter.forward_backward(batch, loss="clip")
        yield ()
        groups = session.sample(["1+1=", "2+3="], n_samples=2, snapshot=snapshot)
        second = adapter.forward_backward(
            session.batch(datums(seed, turn + 10)), loss={"name": "clip", "eps_clip": 0.1}
        )
        yield ()
        sampled = session.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3, 4], snapshot=snapshot)
        report = adapter.optim_step(lr=0.01 * (turn + 1), betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, grad_clip=0.3)
        yield ()
        snapshot.drop()
        yield (
            first.loss,
            first.log_probs.tobytes(),
            second.loss,
            report.grad_norm,
            report.lr,
            bits(sampled),
            [sample.tokens.tobytes() for group in groups for sample in group.samples],
            adapter.forward(batch).tobytes(),
        )


def found(parts: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [part for part in parts if part]


@pytest.mark.bits
def test_adapters_do_not_depend_on_one_another(
    tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path
) -> None:
    alone = {}
    for seed, (name, options) in enumerate(OPTIONS.items()):
        with opened(f"alone-{name}") as session:
            adapter = session.add_adapter(name, **options)
            alone[name] = found(list(steps(session, adapter, seed)))
            adapter.save(tmp_path / f"{name}-alone")
    with opened("together") as session:
        base = bits(session.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3, 4]))
        running = {
            name: steps(session, session.add_adapter(name, **options), seed)
            for seed, (name, options) in enumerate(OPTIONS.items())
        }
        assert list(session.adapters) == list(OPTIONS)
        parts: dict[str, list[tuple[Any, ...]]] = {name: [] for name in OPTIONS}
        # One is ahead of the others.
        for _ in range(3):
            parts["b"].append(next(running["b"]))
        for _ in range(5):
            for name in ("c", "b", "a"):
                parts[name].append(next(running[name]))
        for name in OPTIONS:
            parts[name] += list(running[name])
            assert found(parts[name]) == alone[name]
            session.adapters[name].save(tmp_path / name)
            assert session.adapters[name].step == 2
        assert bits(session.generate(PROMPTS, SAMPLING, seeds=[1, 2, 3, 4])) == base
        assert (session.step, session.version) == (0, 0)
    assert len({steps_[0][5][0] for steps_ in alone.values()}) == 1, "samples of new adapters are those of the base"
    assert len({tuple(steps_[1][5]) for steps_ in alone.values()}) == 3, "and of trained ones their own"
    for name in OPTIONS:
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            one, other = (load_file(tmp_path / folder / file) for folder in (name, f"{name}-alone"))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_snapshot_keeps_its_weights(tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    """Its log-probs are those of peft on the files; later steps do not change it."""
    with opened("snapshots") as session:
        adapter = session.add_adapter("a", **OPTIONS["a"])
        train(session, adapter, 0)
        before = adapter.snapshot()
        adapter.save(tmp_path / "before", optimizer=False)
        sampled = session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=before)
        train(session, adapter, 1)
        after = adapter.snapshot()
        assert bits(session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=before)) == bits(sampled)
        later = session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=after)
        assert bits(later) != bits(sampled)
        loaded = session.load_snapshot(tmp_path / "before")
        assert bits(session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=loaded)) == bits(sampled)
        (scored, *_) = session.prompt_log_probs([PROMPTS[2]], top_k=2, snapshot=before)
        # Sampler and trainer agree.
        whole = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, sampled, strict=True)]
        batch = session.batch([Datum(tokens=w, prompt_length=len(p)) for w, p in zip(whole, PROMPTS, strict=True)])
        resumed = session.load_adapter("again", tmp_path / "before")
        np.testing.assert_allclose(
            resumed.forward(batch), np.concatenate([one.log_probs for one in sampled]), atol=1e-5
        )
        assert (resumed.rank, resumed.step, adapter.step) == (4, 0, 2)
        before.drop()
        before.drop()
        with pytest.raises(ConfigError, match=r'snapshot "a@0": it was dropped'):
            session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=before)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder / "base", dtype=torch.float64)
    model = PeftModel.from_pretrained(model, tmp_path / "before").double().eval()
    for prompt, one in zip(PROMPTS, sampled, strict=True):
        tokens = torch.tensor([[*prompt, *one.token_ids.tolist()]])
        rows = model(input_ids=tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = rows.gather(1, tokens[0, len(prompt) :, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(one.log_probs, expected, atol=1e-4)
    rows = model(input_ids=torch.tensor([PROMPTS[2]])).logits[0, :-1].log_softmax(-1)
    np.testing.assert_allclose(scored.log_probs, rows[torch.arange(4), PROMPTS[2][1:]].detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(scored.top_log_probs, rows.topk(2).values.detach().numpy(), atol=1e-4)
    assert scored.top_ids.tolist() == rows.topk(2).indices.tolist()


def train(session: TrainingSession, adapter: Adapter, turn: int) -> None:
    adapter.forward_backward(session.batch(datums(0, turn)), loss="clip")
    adapter.optim_step(lr=0.03)


@pytest.mark.bits
def test_a_saved_adapter_continues_to_the_bit(
    tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path
) -> None:
    with opened("first") as session:
        adapter = session.add_adapter("a", **OPTIONS["a"])
        train(session, adapter, 0)
        assert adapter.save(tmp_path / "half") == tmp_path / "half"
        train(session, adapter, 1)
        whole = adapter.forward(session.batch(datums(0, 5))).tobytes()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    with opened("second") as session:
        adapter = session.load_adapter("other", tmp_path / "half", optimizer=True)
        assert adapter.step == 1
        train(session, adapter, 1)
        assert adapter.forward(session.batch(datums(0, 5))).tobytes() == whole
        adapter.save(tmp_path / "plain", optimizer=False)
        with pytest.raises(CheckpointError, match="saved without its optimizer"):
            session.load_adapter("third", tmp_path / "plain", optimizer=True)
        session.load_adapter("third", tmp_path / "plain").remove()


def test_an_adapter_learns_from_rewards(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    """The loop of docs/own-loop.md; the reference is the base."""
    overrides = {"model.ref_load": "base", "algo.kl_loss_coef": 0.01}
    with opened("rewards", overrides) as session:
        mine = session.add_adapter("mine", rank=8)
        means = []
        for _ in range(12):
            snapshot = mine.snapshot()
            groups = session.score(session.sample(4, n_samples=4, snapshot=snapshot), reward=share_of_large_tokens)
            means.append(np.mean([sample.reward for group in groups for sample in group.samples]))
            batch = mine.credit(groups)
            assert batch.columns.ref_log_probs is not None
            mine.forward_backward(batch)
            mine.optim_step(lr=0.02)
            snapshot.drop()
        assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.15, means


def share_of_large_tokens(sample: Any) -> float:
    return float((sample.response_tokens > 8).mean())


def test_generate_runs_beside_other_calls(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    """From many threads, while gradients are computed; none is lost, and each is what it is alone."""
    with opened("beside") as session:
        adapter = session.add_adapter("a", **OPTIONS["a"])
        train(session, adapter, 0)
        snapshot = adapter.snapshot()
        expected = [session.generate([PROMPTS[n % 4]], SAMPLING, seeds=[n], snapshot=snapshot)[0] for n in range(40)]
        responses: dict[int, Completion] = {}

        def ask(number: int) -> None:
            (responses[number],) = session.generate([PROMPTS[number % 4]], SAMPLING, seeds=[number], snapshot=snapshot)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads[:20]:
            thread.start()
        adapter.forward_backward(session.batch(datums(0, 1)), loss="clip")
        futures = [session.start_generating(PROMPTS, SAMPLING, seeds=[0, 1, 2, 3], snapshot=snapshot) for _ in range(5)]
        for thread in threads[20:]:
            thread.start()
        adapter.optim_step(lr=0.1)
        for thread in threads:
            thread.join(timeout=60)
        for number, one in enumerate(expected):
            assert responses[number].token_ids.tolist() == one.token_ids.tolist()
            np.testing.assert_allclose(responses[number].log_probs, one.log_probs, atol=1e-5)
        assert {tuple(map(len, (one.token_ids for one in future.result(60)))) for future in futures}
        # An engine refuses all requests that come together with a wrong one; the client sends each again, alone.
        wrong = SamplingParams(max_new_tokens=4, structural_tag="{}")
        kinds = [SAMPLING, wrong] * 6
        mixed = [session.start_generating([PROMPTS[0]], kind, seeds=[0], snapshot=snapshot) for kind in kinds]
        for future, kind in zip(mixed, kinds, strict=True):
            if kind is wrong:
                with pytest.raises(EngineRefused, match="guided decoding"):
                    future.result(60)
            else:
                assert future.result(60)[0].token_ids.tolist() == expected[0].token_ids.tolist()
        long = SamplingParams(max_new_tokens=64, min_new_tokens=64)
        client = session._session.client
        assert client is not None
        # On a busy machine they may have ended before this thread has its turn.
        while len(client._asked) < len(PROMPTS):
            future = session.start_generating(PROMPTS, long, seeds=[0, 1, 2, 3], snapshot=snapshot)
            while len(client._asked) < len(PROMPTS) and not future.done():
                time.sleep(0.001)
        future.cancel()
        with pytest.raises(CancelledError):
            future.result()
        # Its engine does not generate on.
        while client._asked:
            time.sleep(0.001)
        assert not client.engine(0)._engine._decoder.busy
        running = session.start_generating(PROMPTS, long, seeds=[0, 1, 2, 3], snapshot=snapshot)
        snapshot.drop()
        assert {one.finish_reason for one in running.result(60)} <= {FinishReason.ABORT, FinishReason.LENGTH}


def test_a_restarted_engine_has_the_snapshots(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    options = {"rollout.use_fault_tolerance": True, "rollout.rollout_health_check_interval": 0.1}
    with opened("restarted", options) as session:
        adapter = session.add_adapter("a", **OPTIONS["a"])
        train(session, adapter, 0)
        snapshot, dropped = adapter.snapshot(), adapter.snapshot()
        expected = session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=snapshot)
        dropped.drop()
        client = session._session.client
        assert client is not None
        engine = client.engine(0)
        assert engine is not None
        session._live.do(lambda: engine.call("stop"))
        again = session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=snapshot)
        for one, other in zip(again, expected, strict=True):
            # Perhaps in other batches than before.
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert client.engine(0) is not engine
        assert len(session.prompt_log_probs([PROMPTS[0]], snapshot=snapshot)) == 1
        other = client.engine(0)
        assert other is not None
        session._live.do(lambda: other.call("stop"))
        groups = session.sample(["1+1=", "2+3="], n_samples=2, snapshot=snapshot)
        assert [sample.status for group in groups for sample in group.samples].count(Status.FAILED) == 0
        assert client.engine(0) is not other


@pytest.mark.ray
def test_with_two_ranks_under_ray(tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("one") as session:
        adapter = session.add_adapter("a", **OPTIONS["a"])
        (expected,) = (part for part in list(steps(session, adapter, 0))[:4] if part)
    ray = {"launcher": {"name": "ray", "actor_num_gpus_per_node": 2}}
    with opened("ray", ray) as session:
        adapter, other = (session.add_adapter(name, **OPTIONS[name]) for name in "ab")
        train(session, other, 3)
        parts = steps(session, adapter, 0)
        next(parts)
        train(session, other, 4)
        (found,) = (part for part in (next(parts) for _ in range(3)) if part)
        adapter.save(tmp_path / "a")
        assert session.load_adapter("again", tmp_path / "a", optimizer=True).step == 1
    for place in (0, 2, 3):
        assert found[place] == pytest.approx(expected[place], rel=1e-4)
    assert found[4:7] == expected[4:7], "the snapshot is of a new adapter: its samples are those of the base"
    for place in (1, 7):
        np.testing.assert_allclose(*(np.frombuffer(one[place], np.float32) for one in (found, expected)), atol=1e-4)


def test_taking_turns_on_the_same_devices_loses_no_gradients(opened: Callable[..., TrainingSession]) -> None:
    with opened("turns", {"launcher.colocate": True, "launcher.offload_train": True}) as session:
        assert session._session.colocation.offloads
        adapter = session.add_adapter("a", rank=2)
        snapshot = adapter.snapshot()
        batch = session.batch(datums(0, 0))
        adapter.forward_backward(batch, loss="clip")
        for call, name in (
            (session.sample, "sample"),
            (lambda: session.sample(1, snapshot=snapshot), "sample"),
            (lambda: session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=snapshot), "generate"),
            (session.collect, "collect"),
            (session.update_weights, "update_weights"),
            (session.evaluate, "evaluate"),
            (adapter.snapshot, "snapshot"),
        ):
            with pytest.raises(
                TrainingError, match=f"{name} between forward_backward and optim_step of a: trainers and"
            ):
                call()
        assert adapter.optim_step(lr=0.01).grad_norm > 0
        assert session.sample(1, snapshot=snapshot)


def test_what_is_refused(tiny: TinyRun, opened: Callable[..., TrainingSession], tmp_path: Path) -> None:
    with opened("refused", {"engine.max_adapters": 1}) as session:
        batch = session.batch(datums(0, 0))
        for call in (
            lambda: session.forward_backward(batch, loss="clip"),
            session.optim_step,
            session.save,
            session.export,
        ):
            with pytest.raises(ConfigError, match=r"weights are frozen, and adapters are trained over them"):
                call()
        adapter = session.add_adapter("a", rank=2)
        with pytest.raises(TrainingError, match='"a": optim_step without gradients'):
            adapter.optim_step()
        with pytest.raises(ConfigError, match='"a": the name is in use'):
            session.add_adapter("a", rank=2)
        with pytest.raises(ConfigError, match="rank = 0"):
            session.add_adapter("b", rank=0)
        with pytest.raises(ModelError, match="nowhere: it cannot be read as an adapter"):
            session.load_adapter("b", tmp_path / "nowhere")
        for name in "bc":
            session.add_adapter(name, rank=1)
        with pytest.raises(ConfigError, match=r'"d": the trainers hold 3 already'):
            session.add_adapter("d", rank=1)
        adapter.forward_backward(batch, loss="clip")
        for wrong, message in (
            ({"lr": -1.0}, "lr = -1.0"),
            ({"betas": (0.9, 1.0)}, "betas"),
            ({"grad_clip": float("nan")}, "grad_clip = nan"),
        ):
            with pytest.raises(ConfigError, match=message):
                adapter.optim_step(**wrong)
        snapshot = adapter.snapshot()
        with pytest.raises(
            ConfigError, match=r"the engines hold 1 already. Drop one, or set a larger engine.max_adapters"
        ):
            adapter.snapshot()
        with pytest.raises(DataError, match="4 prompts and 1 seeds"):
            session.generate(PROMPTS, SAMPLING, seeds=[1], snapshot=snapshot)
        with pytest.raises(DataError, match=r"prompts\[1\]"):
            session.generate([[1], []], SAMPLING, seeds=[1, 2])
        with pytest.raises(
            DataError, match=r"prompts\[0\]: token ids from 1000000 to 1000000; the model's vocabulary has"
        ):
            session.generate([[10**6]], SAMPLING, seeds=[1], snapshot=snapshot)
        with pytest.raises(DataError, match=r"datums\[0\].tokens: token ids from -1 to 3"):
            session.batch([Datum(tokens=[3, -1], prompt_length=1)])
        with pytest.raises(ConfigError, match="top_p = 2"):
            session.generate([[1]], SamplingParams(max_new_tokens=1, top_p=2), seeds=[1])
        with pytest.raises(EngineRefused, match="guided decoding"):
            session.generate([[1]], SamplingParams(max_new_tokens=1, structural_tag="{}"), seeds=[1])
        adapter.remove()
        adapter.remove()
        with pytest.raises(ConfigError, match='"a": it was removed'):
            adapter.forward(batch)
        # Its snapshot is there.
        assert len(session.generate(PROMPTS, SAMPLING, seeds=range(4), snapshot=snapshot)) == 4
        assert isinstance(snapshot, Snapshot)


def test_backends_and_engines_without_adapters(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    with opened("whole", {"backend.max_adapters": 0}) as session:
        with pytest.raises(ConfigError, match=r"Set backend.max_adapters"):
            session.add_adapter("a", rank=2)
        # The whole model: settings by call, and samples between gradients and step.
        batch = session.batch(datums(0, 0))
        gradients = session.forward_backward(batch, loss="clip")
        np.testing.assert_array_equal(gradients.log_probs, session.forward(batch))
        assert np.isfinite(gradients.loss)
        before = bits(session.generate(PROMPTS, SAMPLING, seeds=range(4)))
        assert len(session.sample(2)) == 2
        report = session.optim_step(lr=0.5, betas=(0.5, 0.5), weight_decay=0.0, grad_clip=0.0)
        assert report.lr == 0.5
        assert bits(session.generate(PROMPTS, SAMPLING, seeds=range(4))) == before
        session.update_weights()
        assert bits(session.generate(PROMPTS, SAMPLING, seeds=range(4))) != before
    with opened("sgd", {"backend.max_adapters": 0, "train.optimizer": "sgd"}) as session:
        session.forward_backward(session.batch(datums(0, 0)), loss="clip")
        with pytest.raises(
            ConfigError, match=r'betas, eps: optimizer "sgd" takes lr, weight_decay, grad_clip from a call'
        ):
            session.optim_step(betas=(0.1, 0.1), eps=0.1)
        session.optim_step(lr=0.1, weight_decay=0.1)
