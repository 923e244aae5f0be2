"""Runs whose plugins misbehave at their second step: one paragraph names the plugin and what it was called on, the exit code
is documented, and the step before is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

PLUGIN, REWARD, TRAINING = 2, 4, 6

PLUGINS = """
import sys
from pathlib import Path

import numpy as np

from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator, Credit, RewardShaper, ShapingDriver
from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.correction import BatchCorrection, CorrectionDriver, OffPolicyCorrection
from slime_core.contracts.filter import BufferFilter, BufferFilterDriver, FilterDecision
from slime_core.contracts.loss import LossOutput
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_core.contracts.reward import SpanRewards
from slime_core.contracts.source import DataSource, SourceDriver
from slime_core.contracts.tracker import Tracker, TrackerDriver
from slime_core.plugin import driver, generator, group_filter, hook, loss, reward

WHAT = Path("what").read_text()
KIND, _, HOW = WHAT.partition(": ")


def misbehave(kind, due, good):
    if KIND != kind or not due:
        return good()
    match HOW:
        case "raises":
            raise KeyError("acc")
        case "exits":
            sys.exit(3)
        case "interrupts":
            raise KeyboardInterrupt
        case "returns None":
            return None
        case "returns too much":
            return 10**400
        case "returns a huge number":
            return 10**5000
        case "returns NaN":
            return good() * np.nan
        case "returns a scalar":
            return np.float32(1)
        case "returns a span of text":
            return SpanRewards([("a", "b", 1)])


def second(step):
    return step == 1


@reward("bad")
def bad_reward(sample):
    return misbehave("reward", sample.group_index == 2, lambda: float(sample.index % 2))


@reward("bad_group")
def bad_group_reward(group):
    good = [float(sample.index % 2) for sample in group.samples]
    return good[:1] if KIND == "group reward" and group.group_index == 2 else good


@group_filter("bad")
def bad_filter(group):
    if HOW == "returns a place that is not there":
        return FilterDecision(keep=True, masked_indices=(7,))
    return misbehave("group filter", group.group_index == 2, lambda: True)


class Buffered(BufferFilter):
    def select(self, items, num_groups, versions):
        return misbehave("buffer filter", True, lambda: list(range(min(num_groups, len(items)))))


@driver("slime.filters", "bad_buffer")
class BufferedDriver(BufferFilterDriver):
    @classmethod
    def build(cls, config):
        return Buffered()


def made(kind, group, contract_driver, cls):
    name = f"bad_{kind.replace(' ', '_')}"
    def build(driver, config):
        return misbehave(f"building the {kind}", True, cls)
    body = {"build": classmethod(build), "__module__": __name__, "needs": frozenset()}
    thing = driver(group, name)(type(contract_driver)(name, (contract_driver,), body))
    globals()[name] = thing


class Middleware(RouterMiddleware):
    async def __call__(self, request, call_next):
        completion = await call_next(request)
        return misbehave("middleware", request.request_id.startswith("train/4"), lambda: completion)

    def metrics(self):
        return misbehave("middleware counters", True, dict)


made("middleware", "slime.middlewares", MiddlewareDriver, Middleware)


class Log(Tracker):
    def start(self, run): ...

    def log(self, axis, step, metrics, *, rollout_id):
        misbehave("tracker", second(rollout_id), lambda: None)

    def finish(self): ...


made("tracker", "slime.trackers", TrackerDriver, Log)


class Estimate(AdvantageEstimator):
    def estimate(self, inputs):
        due = 4 in inputs.batch.index
        good = lambda: inputs.rewards[inputs.batch.sample_of_token].astype(np.float32)
        if KIND == "advantage" and HOW == "returns None":
            return misbehave("advantage", due, lambda: Credit(advantages=good()))
        return Credit(advantages=misbehave("advantage", due, good))


made("advantage", "slime.advantages", AdvantageDriver, Estimate)


class Shape(RewardShaper):
    def shape(self, rewards, batch, max_response_len):
        return misbehave("shaping", 4 in batch.index, lambda: rewards)


made("shaping", "slime.advantages", ShapingDriver, Shape)


class Correct(OffPolicyCorrection):
    def correct_batch(self, batch, columns):
        ones = np.ones(len(batch.mask), np.float32)
        weights = misbehave("correction", 4 in batch.index, lambda: ones)
        return BatchCorrection(weights=weights, keep=ones > 0)


made("correction", "slime.corrections", CorrectionDriver, Correct)


@loss("bad", needs=set())
def bad_loss(inputs, segments):
    good = lambda: -inputs.log_probs * inputs.advantages
    due = KIND == "loss" and Path("step").exists()
    return LossOutput(values=misbehave("loss", due, good))


@hook
def rollout_end(event):
    if second(event.rollout_id):
        Path("step").touch()
    misbehave("hook", second(event.rollout_id), lambda: None)


@generator("bad")
async def bad_generator(episode):
    trajectory = episode.trajectory()
    trajectory.append_completion(await episode.complete(trajectory.tokens))
    due = trajectory.finish().index == 4
    return misbehave("generator", due, lambda: [trajectory.finish()])


class Collected(Collector):
    async def collect(self, step, context):
        from slime_core.rollout.accepted import AcceptedGroups

        good = await AcceptedGroups().collect(step, context)
        return misbehave("collector", second(step), lambda: good)


made("collector", "slime.collectors", CollectorDriver, Collected)


class Source(DataSource):
    def __init__(self, renderer):
        self.renderer, self.next = renderer, 0

    def take(self, num_prompts):
        first, self.next = self.next, self.next + num_prompts
        prompts = [
            self.renderer.render({"prompt": "1+1=", "label": "2"}, group_index=n, origin=f"row {n}")
            for n in range(first, self.next)
        ]
        if KIND == "source" and HOW == "yields None" and first == 2:
            return [prompts[0], None]
        return misbehave("source", first == 2, lambda: prompts)

    def observe(self, groups):
        misbehave("source's observe", 2 in [group.group_index for group in groups], lambda: None)
        self.seen = np.float32(1) if 2 in [group.group_index for group in groups] else 1

    def state(self):
        seen = getattr(self, "seen", 0)
        return {"next": self.next, "seen": seen if KIND == "source's state" else 0}

    def restore(self, state):
        self.next = state["next"]
        self.seen = state["seen"]

    @property
    def num_rows(self):
        return None

    def fingerprint(self):
        return "none"


@driver("slime.sources", "bad")
class SourceMaker(SourceDriver):
    @classmethod
    def build(cls, config):
        return lambda renderer, *, seed: misbehave("building the source", True, lambda: Source(renderer))
"""


@dataclass(frozen=True)
class Case:
    words: Sequence[str]
    code: int
    expected: Sequence[str]
    saved: int = 1
    """Steps that the checkpoint holds; 0: nothing was trained."""


ROW = "{folder}/train.jsonl, line 3"
REWARDED = f'reward "bad.py/bad" on {ROW}'
BAD_FILTER, SOURCE = f'group filter "bad.py/bad", decide on {ROW}: ', 'data source "bad.py/bad", '
SHAPE = "an array of shape"
CASES = {
    "reward: raises": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: raised KeyError: 'acc' (bad.py:", "in bad_reward"]),
    "reward: exits": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: raised SystemExit: 3 (bad.py:"]),
    "reward: interrupts": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: raised KeyboardInterrupt (bad.py:"]),
    "reward: returns None": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: returned None, which is not a number"]),
    "reward: returns too much": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: returned a number too large for a float"]),
    "reward: returns a huge number": Case(["--reward", "bad"], REWARD, [f"{REWARDED}: returned a number too large"]),
    "reward: returns a span of text": Case(["--reward", "bad"], REWARD, [REWARDED, "TypeError"]),
    "group reward: too few": Case(
        ["--reward", "bad_group"], REWARD, [f'reward "bad.py/bad_group" on {ROW}: returned 1 values for 2 samples']
    ),
    "group filter: raises": Case(["--filters", "bad"], PLUGIN, [f"{BAD_FILTER}raised KeyError: 'acc' (bad.py:"]),
    "group filter: exits": Case(["--filters", "bad"], PLUGIN, [f"{BAD_FILTER}raised SystemExit: 3"]),
    "group filter: interrupts": Case(["--filters", "bad"], PLUGIN, [f"{BAD_FILTER}raised KeyboardInterrupt"]),
    "group filter: returns None": Case(["--filters", "bad"], PLUGIN, [f"{BAD_FILTER}returned None; return a FilterDecision"]),
    "group filter: returns a place that is not there": Case(
        ["--filters", "bad"], PLUGIN, ["masked_indices [7]: the group has 2 samples"], saved=0
    ),
    "middleware: raises": Case(
        ["--router-middlewares", "bad_middleware"],
        REWARD,
        ["failed so: KeyError: 'acc' (bad.py:"],
    ),
    "middleware: returns None": Case(
        ["--router-middlewares", "bad_middleware"],
        PLUGIN,
        ['router middleware "bad.py/bad_middleware", request train/4/0: returned None, not a Completion'],
    ),
    "middleware counters: raises": Case(
        ["--router-middlewares", "bad_middleware"],
        PLUGIN,
        ['router middleware "bad.py/bad_middleware", metrics: raised KeyError'],
    ),
    "tracker: raises": Case(
        ["--trackers", "jsonl,bad_tracker"],
        PLUGIN,
        ['tracker "bad.py/bad_tracker", log of train/step 1: raised KeyError'],
        saved=2,
    ),
    "tracker: exits": Case(["--trackers", "bad_tracker"], PLUGIN, ["log of train/step 1: raised SystemExit: 3"], saved=2),
    "building the tracker: raises": Case(
        ["--trackers", "bad_tracker"], PLUGIN, ['tracker "bad.py/bad_tracker", build: raised KeyError'], saved=0
    ),
    "advantage: raises": Case(
        ["--algo.advantage", "bad_advantage"], PLUGIN, ['advantage "bad.py/bad_advantage", estimate: raised KeyError']
    ),
    "advantage: returns None": Case(["--algo.advantage", "bad_advantage"], PLUGIN, ["estimate: returned None, not a Credit"]),
    "advantage: returns a scalar": Case(
        ["--algo.advantage", "bad_advantage"], PLUGIN, ["estimate: advantages: returned", SHAPE]
    ),
    "advantage: returns NaN": Case(
        ["--algo.advantage", "bad_advantage"], TRAINING, ["advantages of sample 4 (group 2) are not finite"]
    ),
    "shaping: returns None": Case(
        ["--algo.shaping", "bad_shaping"], PLUGIN, ['"bad.py/bad_shaping", shape: returned None; ' + SHAPE]
    ),
    "shaping: returns NaN": Case(
        ["--algo.shaping", "bad_shaping"], PLUGIN, ["shape: returned nan for sample 4 (group 2), whose reward is"]
    ),
    "correction: returns a scalar": Case(
        ["--corrections", "bad_correction"],
        PLUGIN,
        ['correction "bad.py/bad_correction", correct_batch: weights: returned', SHAPE],
    ),
    "hook: exits": Case([], PLUGIN, ['observer "bad.py/bad", rollout_end: raised SystemExit: 3', "leave out --plugin bad.py"]),
    "generator: raises": Case(
        ["--generate", "bad", "--max-retries", "0"], REWARD, ["failed so: KeyError: 'acc' (bad.py:", "in bad_generator"]
    ),
    "generator: exits": Case(["--generate", "bad", "--max-retries", "0"], REWARD, ["failed so: SystemExit: 3"]),
    "generator: returns None": Case(
        ["--generate", "bad"], PLUGIN, ['generator "bad.py/bad" returned None; return a list of Samples']
    ),
    "collector: raises": Case(
        ["--collector", "bad_collector"], REWARD, ['collector "bad.py/bad_collector", collect of step 1: raised KeyError']
    ),
    "collector: returns None": Case(
        ["--collector", "bad_collector"], PLUGIN, ["collect of step 1: returned None; return a list of 2 SampleGroups"]
    ),
    "source: raises": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}take(2): raised KeyError: 'acc'"]),
    "source: exits": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}take(2): raised SystemExit: 3"]),
    "source: returns None": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}take(2): raised TypeError"]),
    "source: yields None": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}take(2): returned None at position 1; every item"]),
    "source's observe: raises": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}observe: raised KeyError"]),
    "source's state: becomes something else": Case(
        ["--source", "bad"], PLUGIN, [f"{SOURCE}state: the value['seen'] is of type float32, which JSON cannot hold"]
    ),
    "building the source: returns None": Case(["--source", "bad"], PLUGIN, [f"{SOURCE}build:", "None"], saved=0),
    "loss: raises": Case(["--algo.loss", "bad"], TRAINING, ['loss "bad.py/bad", loss of a micro-batch: raised KeyError'], saved=0),
    "loss: returns a scalar": Case(["--algo.loss", "bad"], PLUGIN, ['loss "bad.py/bad"', "a tensor of shape"], saved=0),
}


@pytest.mark.parametrize("what", CASES)
def test_a_plugin_that_misbehaves_is_named_and_what_was_trained_is_saved(tiny: TinyRun, what: str) -> None:
    case = CASES[what]
    (tiny / "bad.py").write_text(PLUGINS)
    (tiny / "what").write_text(what)
    ended = tiny.run("--plugin", "bad.py", "--num-rollout", "2", "--save-interval", "none", "--max-filtered-groups", "1", *case.words)
    message = ended.error
    missing = [text for text in case.expected if text.replace("{folder}", str(tiny.folder)) not in message]
    assert not missing, f"{missing} not in: {message}"
    assert ended.code == case.code, message
    assert tiny.checkpoints() == ([f"step_{case.saved}"] if case.saved else []), message
