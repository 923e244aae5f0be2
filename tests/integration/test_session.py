"""slime as a library: loops of one's own beside `slime run`, to the bit; explicit datums beside torch; errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import slime_core
from slime_core.contracts.hookspecs import hookimpl
from slime_core.errors import (
    ConfigError,
    DataError,
    PluginError,
    RolloutError,
    RolloutsExhausted,
    SlimeError,
    TrainingError,
)
from slime_core.types.batch import TokenColumns
from slime_core.types.completion import SamplingParams
from slime_plugin_kit.warm_slime import WarmSlime
from slime_session import Datum, TrainingSession, open_session

if TYPE_CHECKING:
    from conftest import TinyRun

REWARD = '''
from slime_core.plugin import reward


@reward("digits")
def digits(sample):
    """The share of digits, which differs from response to response."""
    return sum(one.isdigit() for one in sample.response) / 4
'''
SET: Mapping[str, Any] = {
    "plugin": ["digits.py"],
    "reward": "digits",
    "rollout.rollout_batch_size": 4,
    "train.num_rollout": 3,
    "train.num_steps_per_rollout": 2,
    "model.ref_load": "base",
    "algo.kl_loss_coef": 0.05,
    "train.ref_update_interval": 2,
}
"""Groups with a signal, several optimizer steps, and frozen copies that are updated."""


@pytest.fixture(scope="module")
def tiny(make_tiny: Callable[[Path], TinyRun], warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """With the run `whole`, as `slime run` ends it."""
    tiny = make_tiny(tmp_path_factory.mktemp("session"))
    tiny.warm = warm
    (tiny / "digits.py").write_text(REWARD)
    text = (tiny / "run.toml").read_text()
    (tiny / "whole.toml").write_text(text)
    ended = tiny.slime("run", "whole.toml", "--name", "whole", *words(SET))
    assert ended.code == 0, ended.err
    return tiny


def words(overrides: Mapping[str, Any]) -> list[str]:
    """As a user types them."""
    return [
        word
        for key, value in overrides.items()
        for word in ("--set", f"{key}={json.dumps(value)}" if not isinstance(value, str) else f'{key}="{value}"')
    ]


@pytest.fixture
def opened(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingSession]:
    monkeypatch.chdir(tiny.folder)

    def open_(name: str, overrides: Mapping[str, Any] | None = None, **options: Any) -> TrainingSession:
        session = slime_core.open_session("run.toml", overrides={**SET, "name": name, **(overrides or {})}, **options)
        assert isinstance(session, TrainingSession)
        return session

    return open_


def step(session: TrainingSession) -> None:
    batch = session.credit(session.score(session.sample()))
    for number in range(batch.num_steps):
        session.forward_backward(batch, step=number)
        session.optim_step()
    session.update_weights()


def trained(tiny: TinyRun, run: str, at: int = 3) -> dict[str, np.ndarray]:
    """Weights and optimizer state of a checkpoint."""
    files = sorted((tiny.runs / run / f"checkpoints/step_{at}/trainer/actor/state").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert any("exp_avg" in name for name in found)
    return found


def require_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if one[name].tobytes() != other[name].tobytes()]


def logged(tiny: TinyRun, run: str) -> list[dict[str, Any]]:
    """What trackers got, but times."""
    return [
        {**line, "metrics": {key: value for key, value in line["metrics"].items() if not key.startswith("perf/")}}
        for line in tiny.metrics(run)
    ]


@pytest.mark.bits
def test_a_loop_of_ones_own_equals_the_run(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    with opened("own") as session:
        for number in range(3):
            assert (session.step, session.version) == (number, number)
            step(session)
        assert session.save() == tiny.runs / "own/checkpoints/step_3"
    whole = trained(tiny, "whole")
    require_same(trained(tiny, "own"), whole)
    assert logged(tiny, "own") == logged(tiny, "whole")
    assert max(line["metrics"].get("train/grad_norm", 0.0) for line in logged(tiny, "own")) > 0.1
    assert any(whole[name].tobytes() != tensor.tobytes() for name, tensor in trained(tiny, "whole", 1).items())


@pytest.mark.bits
def test_a_run_continues_what_a_session_saved_and_back(
    tiny: TinyRun, opened: Callable[..., TrainingSession], warm: WarmSlime
) -> None:
    with opened("turns") as session:
        batch = session.credit(session.collect())
        report = session.train(batch)
        assert report.version == session.version == session.step == 1
        session.save()
        # Nothing of this is kept.
        step(session)
    ended = tiny.slime("run", "whole.toml", "--name", "turns", *words(SET))
    assert ended.code == 0, ended.err
    require_same(trained(tiny, "turns"), trained(tiny, "whole"))
    with opened("turns", resume=tiny.runs / "turns", ckpt_step=2) as session:
        assert session.step == 2
        step(session)
        session.save()
        with pytest.raises(RolloutsExhausted, match="all 3 rollout steps of this run are trained"):
            session.collect()
        model = session.export()
    require_same(trained(tiny, "turns"), trained(tiny, "whole"))
    assert (model / "config.json").exists()


def test_run_does_what_the_command_does(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    seen = []

    class Observer:
        @hookimpl
        def step_trained(self, event: Any) -> None:
            seen.append(event.rollout_id)

    result = slime_core.run("run.toml", overrides={**SET, "name": "called"}, observers={"mine": Observer()})
    assert (result.steps, result.ended_early, result.folder) == (3, None, tiny.runs / "called")
    assert seen == [0, 1, 2]
    require_same(trained(tiny, "called"), trained(tiny, "whole"))
    with pytest.raises(ConfigError, match="this run is finished, with 3 steps"):
        slime_core.run("run.toml", overrides={**SET, "name": "called"})


@pytest.fixture(scope="module")
def session(tiny: TinyRun) -> Iterator[TrainingSession]:
    """One for all tests that need no particular state. Its run has the clipped loss and no other terms."""
    where = Path.cwd()
    os.chdir(tiny.folder)
    try:
        with open_session("run.toml", overrides={**SET, "name": "open", "algo.kl_loss_coef": 0.0}) as session:
            yield session
    finally:
        os.chdir(where)


def datums(session: TrainingSession) -> list[Datum]:
    random = np.random.default_rng(0)
    return [
        Datum(
            tokens=random.integers(1, 12, size=length),
            prompt_length=2,
            advantages=random.normal(size=length - 2),
            log_probs=-random.uniform(2.0, 3.0, size=length - 2),
            mask=[1] * (length - 3) + [place % 2],
            loss_weights=np.full(length - 2, 0.25),
        )
        for place, length in enumerate((5, 9, 4, 7))
    ]


def expected(tiny: TinyRun, given: list[Datum]) -> tuple[float, float, list[np.ndarray]]:
    """Loss, norm of its gradient, and log-probs, by torch and transformers in float64. Loss: importance sampling, clipped."""
    model = AutoModelForCausalLM.from_pretrained(tiny / "base", dtype=torch.float64)
    loss, scored = torch.zeros((), dtype=torch.float64), []
    for datum in given:
        tokens = torch.as_tensor(np.asarray(datum.tokens), dtype=torch.long)
        start = datum.prompt_length
        logits = model(tokens[None]).logits[0, start - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[start:, None])[:, 0]
        ratio = (log_probs - torch.as_tensor(datum.log_probs)).exp()
        advantages = torch.as_tensor(datum.advantages)
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss - (0.25 * torch.as_tensor(datum.mask) * clipped).sum()
        scored.append(log_probs.detach().numpy())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss.detach()), float(norm), scored


def test_datums_have_torchs_log_probs_and_gradients(
    tiny: TinyRun, opened: Callable[..., TrainingSession], session: TrainingSession
) -> None:
    given = datums(session)
    loss, norm, log_probs = expected(tiny, given)
    assert norm > 0.1
    batch = session.batch(given)
    np.testing.assert_allclose(session.forward(batch), np.concatenate(log_probs), rtol=1e-4)
    clip = {"name": "clip", "eps_clip": 0.2}
    # In two parts: gradients add up.
    for part in (given[:1], given[1:]):
        session.forward_backward(session.batch(part), loss=clip)
    before = session.step
    report = session.optim_step(lr=0.0)
    assert (report.lr, report.skipped) == (0.0, False)
    assert report.metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    # With a learning rate of 0 the model is what it was.
    np.testing.assert_array_equal(session.forward(batch), session.forward(session.batch(given)))
    assert session.step == before + 1
    session.forward_backward(session.batch(given), loss=clip)
    session.optim_step(lr=0.01)
    assert np.abs(session.forward(session.batch(given)) - np.concatenate(log_probs)).max() > 1e-3


def test_prompts_and_rewards_of_ones_own(session: TrainingSession) -> None:
    drawn = session.sample(2, n_samples=3)
    assert [len(group.samples) for group in drawn] == [3, 3]
    assert [group.rewards for group in drawn] == [[], []]
    own = session.sample(["1+1=", "2+2="])
    assert [group.prompt.text for group in own] == ["1+1=", "2+2="]
    assert len({group.group_index for group in [*drawn, *own]}) == 4
    scored = session.score(own, lambda sample: float(len(sample.response)))
    assert [group.rewards for group in scored] == [[float(len(s.response)) for s in group.samples] for group in own]
    # Those that there are stay.
    assert session.score(scored)[0].rewards == scored[0].rewards
    assert session.score(drawn)[0].rewards != []
    with pytest.raises(ZeroDivisionError):
        session.score(own, lambda sample: 1 // 0)


async def test_it_works_where_an_event_loop_runs(session: TrainingSession) -> None:
    assert len(session.sample(1)) == 1


def test_old_log_probs_of_several_passes(opened: Callable[..., TrainingSession]) -> None:
    """With one optimizer step for a batch the recipe takes the current log-probs as the old ones: only as long as they are."""
    options = {"train.num_steps_per_rollout": 1, "rollout.rollout_temperature": 0.5}
    with opened("passes", options) as session:
        groups = session.score(session.sample())
        batch, other = session.credit(groups), session.credit(session.score(session.sample()))
        old = session.forward(batch)
        session.forward_backward(batch)
        session.optim_step()
        for call in (session.forward_backward, session.train):
            with pytest.raises(ConfigError, match=rf"{call.__name__}: the weights have changed since this batch"):
                call(other)
        again = session.credit(groups, replace(batch.columns, old_log_probs=old))
        session.forward_backward(again)
        assert session.optim_step().metrics["train/ppo_kl"] != 0
        with pytest.raises(ConfigError, match='loss = "sft": it is of log-probs at temperature 1, and with "clip"'):
            session.forward_backward(again, loss="sft")


def test_calls_in_a_wrong_order_are_refused(session: TrainingSession) -> None:
    with pytest.raises(TrainingError, match="optim_step without gradients: call forward_backward first"):
        session.optim_step()
    batch = session.credit(session.score(session.sample()))
    assert batch.num_steps == 2
    with pytest.raises(ConfigError, match=r"this batch has 2 optimizer steps .*pass step=0"):
        session.forward_backward(batch)
    with pytest.raises(ConfigError, match="step = 2, and the batch has 2 optimizer steps"):
        session.forward_backward(batch, step=2)
    with pytest.raises(PluginError, match='loss = "clop": unknown loss; close match: clip'):
        session.forward_backward(batch, step=0, loss="clop")
    with pytest.raises(ConfigError, match='loss = "clip": the batch has no old_log_probs'):
        session.forward_backward(session.batch([Datum(tokens=[1, 2, 3], prompt_length=1)]), loss="clip")
    own = session.sample(1, n_samples=1)
    zeros = np.zeros(own[0].samples[0].response_length, np.float32)
    with pytest.raises(ConfigError, match="the batch was given values, and the recipe's loss does not read them"):
        session.forward_backward(session.credit(own, TokenColumns(advantages=zeros, values=zeros)))
    session.forward_backward(batch, step=0)
    # The engines have their weights: they sample.
    assert len(session.sample(1)) == 1
    for call in (session.collect, session.update_weights, session.save, session.export):
        with pytest.raises(TrainingError, match=f"{call.__name__} between forward_backward and optim_step"):
            call()
    session.optim_step()
    with pytest.raises(RolloutError, match="credit: 12 rollouts, and a batch of this run has at most 8"):
        session.credit(session.sample(6))
    with pytest.raises(DataError, match=r"datums\[1\].advantages: shape \(3,\), and there are 2 response tokens"):
        session.batch(
            [Datum(tokens=[1, 2], prompt_length=1), Datum(tokens=[1, 2, 3], prompt_length=1, advantages=[1.0] * 3)]
        )


async def cancelled_sample(session: TrainingSession) -> None:
    """While an engine has its requests, perhaps beside those of the rollout that was interrupted before."""
    client = session._session.client
    assert client is not None
    engine: Any = client.engine(0)

    def running() -> list[str]:
        return [name for name in engine._engine._decoder.request_ids if name.startswith("own/")]

    task = asyncio.create_task(session._loop.sample(["1+1=", "2+3="], 8))
    for _ in range(1000):
        if running():
            break
        await asyncio.sleep(0)
    assert len(running()) == 16
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running()


def test_an_interrupt_ends_the_call_alone(opened: Callable[..., TrainingSession]) -> None:
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "signals interrupt the main thread"

    class Impatient:
        pressed = False

        @hookimpl
        def rollout_start(self) -> None:
            if not self.pressed:
                self.pressed = True
                signal.pthread_kill(main, signal.SIGINT)

    with opened(
        "interrupted", {"rollout.rollout_max_response_len": 64}, observers={"impatient": Impatient()}
    ) as session:
        with pytest.raises(KeyboardInterrupt):
            session.collect()
        # What was cancelled has ended in the engine, which would refuse the same requests until then.
        session._live.do(lambda: cancelled_sample(session))
        assert len(session.sample(n_samples=8)) == 4
        batch = session.credit(session.collect())
        session.train(batch)
        assert session.step == 1
    with pytest.raises(SlimeError, match="this session is closed"):
        session.collect()


def test_a_weight_update_that_is_interrupted_is_made_again(opened: Callable[..., TrainingSession]) -> None:
    main = threading.main_thread().ident
    assert main is not None

    class Impatient:
        def __init__(self, transport: Any) -> None:
            self.transport = transport

        async def push(self, *args: Any) -> Any:
            """Interrupted between two engines' weights."""
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(60)

    with opened("cut") as session:
        loop = session._loop
        loop._transport, transport = Impatient(loop._transport), loop._transport  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            session.update_weights()
        for call, name in (
            (session.sample, "sample"),
            (session.collect, "collect"),
            (lambda: session.generate([[5]], SamplingParams(max_new_tokens=1), seeds=[0]), "generate"),
        ):
            with pytest.raises(TrainingError, match=rf"{name}: .* cut a weight update short.* Call update_weights"):
                call()
        loop._transport = transport
        session.update_weights()
        assert session.sample(1)
        assert session.generate([[5]], SamplingParams(max_new_tokens=1), seeds=[0])


def test_observers_learn_why_a_session_ended(opened: Callable[..., TrainingSession]) -> None:
    ends = []

    class Observer:
        @hookimpl
        def run_end(self, event: Any) -> None:
            ends.append(event.error)
            with pytest.raises(SlimeError, match="from one of its own observers"):
                holder[0].save()

    def failing() -> None:
        with opened("ended", observers={"mine": Observer()}) as session:
            holder.append(session)
            raise ZeroDivisionError

    holder: list[TrainingSession] = []
    with pytest.raises(ZeroDivisionError):
        failing()
    assert [type(error) for error in ends] == [ZeroDivisionError]


def test_mistakes_are_those_of_the_command(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    wrong = {"train.lrr": 1.0, "rollout.rollout_batch_size": -1}
    with pytest.raises(ConfigError) as raised:
        opened("wrong", wrong)
    ended = tiny.slime("run", "run.toml", *words({**SET, "name": "wrong", **wrong}))
    assert ended.code == 2
    assert ended.error.strip() == str(raised.value)
    assert not (tiny.runs / "wrong").exists()
    with pytest.raises(ConfigError, match="--fresh removes the run that --resume would resume"):
        opened("wrong", fresh=True, resume="runs/whole")


def test_a_program_without_a_guard_is_named(tiny: TinyRun) -> None:
    """Rewards run in processes, which import the program again."""
    program = 'import slime_core\nslime_core.open_session("run.toml", overrides={"name": "unguarded"}).close()\n'
    (tiny / "program.py").write_text(program)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tiny.folder, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert 'below the line `if __name__ == "__main__":`' in ended.stderr


@pytest.mark.ray
def test_with_two_ranks_under_ray(tiny: TinyRun, opened: Callable[..., TrainingSession]) -> None:
    ray = {"launcher": {"name": "ray", "actor_num_gpus_per_node": 2}}
    with opened("ray", ray) as session:
        step(session)
        batch = session.batch(datums(session))
        session.forward_backward(batch, loss="clip")
        report = session.optim_step(lr=0.0)
        there = load_file(session.export() / "model.safetensors")
    assert report.metrics["train/loss"] != 0
    start, here = load_file(tiny / "base/model.safetensors"), trained(tiny, "whole", 1)
    for name, weights in there.items():
        np.testing.assert_allclose(weights, here[f"model.{name}"], rtol=1e-3, atol=2e-6)
    assert any(np.abs(weights - start[name]).max() > 1e-4 for name, weights in there.items()), "nothing was trained"


def test_the_pages_loop_runs(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/own-loop.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tiny.folder)
    exec(compile(program, "own-loop.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own page
    assert tiny.checkpoints() == ["step_20"]


def test_eval_prints_metrics_and_on_request_completions(tiny: TinyRun) -> None:
    words_of_eval = ("eval", "run.toml", "--eval-prompt-data", "few", "train.jsonl@[0:2]")
    quiet = tiny.slime(*words_of_eval, *words(SET))
    shown = tiny.slime(*words_of_eval, *words(SET), "--print-completions-interval", "1")
    assert (quiet.code, shown.code) == (0, 0), quiet.err + shown.err
    assert json.loads(shown.out) == json.loads(quiet.out)
    title, first, second = shown.err.removeprefix(quiet.err).splitlines()
    assert title == "completions of few:"
    rewards = [float(line.split()[-1]) for line in (first, second)]
    assert np.mean(rewards) == pytest.approx(json.loads(shown.out)["eval/few"])
    unknown = tiny.slime("eval", "run.toml", *words(SET))
    assert unknown.code == 2
    assert "eval.datasets: no evaluation set; pass --eval-prompt-data NAME PATH" in unknown.err
