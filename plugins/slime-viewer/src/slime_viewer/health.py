"""Health: what a run's metrics and events show of its state, and planned beside measured memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slime_viewer.memory_in_use import HOST
from slime_viewer.metric_log import Curve, MetricLog
from slime_viewer.open_run import OpenRun
from slime_viewer.plan_recording import AFTER_S

FULLEST_GPU: Final = "fullest GPU"
RECENT: Final = 10
"""Last values that a finding looks at."""

CHARTS: Final = (
    ("Groups without signal", ("rollout/zero_std/frac",)),
    ("Clip fraction", ("train/pg_clipfrac",)),
    ("Gradient norm", ("train/grad_norm",)),
    ("Skipped steps", ("train/skipped_steps",)),
    ("Trainer minus engine", ("train/train_rollout_logprob_abs_diff",)),
    ("KL of a step", ("train/ppo_kl",)),
    ("Entropy", ("train/entropy_loss", "rollout/entropy")),
    ("Truncated responses", ("rollout/truncated_ratio",)),
    ("Repetition", ("rollout/repetition_frac",)),
    ("Staleness", ("rollout/staleness/mean", "rollout/staleness/max")),
    ("Waiting for rollouts", ("perf/wait_time_ratio",)),
    ("Failed groups", ("rollout/failed_groups", "rollout/aborted_groups")),
    (
        "Failed rewards",
        ("rollout/reward_outcome/wrong", "rollout/reward_outcome/timeout", "rollout/reward_outcome/infra"),
    ),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A finding: the mean of the last values is at or beyond a limit."""

    metric: str
    limit: float
    serious: bool
    text: str
    """`{value}`: the mean, as a share."""


LIMITS: Final = (
    Limit("rollout/zero_std/frac", 0.8, False, "{value:.0%} of the groups have equal rewards and teach nothing."),
    Limit("rollout/truncated_ratio", 0.3, False, "{value:.0%} of the responses reached the length limit."),
    Limit("rollout/repetition_frac", 0.1, False, "{value:.0%} of the responses repeat themselves."),
    Limit("train/pg_clipfrac", 0.3, False, "{value:.0%} of the trained tokens are clipped."),
    Limit("train/train_rollout_logprob_abs_diff", 0.1, True, "Log-probs of trainer and engine differ by {value:.2f}."),
    Limit("perf/wait_time_ratio", 0.5, False, "The trainer waits for {value:.0%} of the time."),
)  # fmt: skip
GRADIENT_GROWTH: Final = 10.0
"""A gradient norm so many times its median is a finding."""


def health(run: OpenRun) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/health`."""
    with run.lock:
        log, events = run.metrics, Counter(str(event.get("event")) for event in run.events)
        failed = sum(event.get("event") == "sample_failed" and not event.get("will_retry") for event in run.events)
        names = {name for _, name in log.names()}
        skipped = log.curve("train/skipped_steps")
        findings = [*found_in_metrics(log), *found_in_events(events, failed)]
        measured = most_memory(run.times)
    planned, problem = planned_memory(run)
    rows = sorted(planned.keys() | measured.keys())
    return {
        "findings": sorted(findings, key=lambda finding: finding["level"] != "serious"),
        "charts": [
            {"title": title, "metrics": there} for title, metrics in CHARTS if (there := [m for m in metrics if m in names])
        ],
        "memory": [
            {"what": what, "planned": planned.get(what), "measured": measured.get(what, (None, None))[0],
             "limit": measured.get(what, (None, None))[1]}
            for what in rows
        ],
        "memory_note": problem if planned or measured else f"Nothing was measured here. {problem or ''}".strip(),
        "skipped_steps": 0 if skipped is None else int(skipped.value.sum()),
        "failed_samples": failed,
        "engines_lost": events["engine_lost"],
    }  # fmt: skip


def finding(level: str, text: str, metric: str | None = None, step: float | None = None) -> dict[str, Any]:
    return {"level": level, "text": text, "metric": metric, "step": step}


def found_in_metrics(log: MetricLog) -> Iterable[dict[str, Any]]:
    for limit in LIMITS:
        curve = log.curve(limit.metric)
        if curve is not None and len(curve.value):
            value = float(curve.value[-RECENT:].mean())
            if value >= limit.limit:
                level = "serious" if limit.serious else "notice"
                yield finding(level, limit.text.format(value=value), limit.metric, curve.rollout[-1])
    skipped = log.curve("train/skipped_steps")
    if skipped is not None and (count := int(skipped.value.sum())):
        step = skipped.rollout[np.flatnonzero(skipped.value)[-1]]
        yield finding("serious", f"{count} optimizer steps were skipped: not finite.", "train/skipped_steps", step)
    if (norm := log.curve("train/grad_norm")) is not None and (step := grown(norm)) is not None:
        yield finding("serious", f"The gradient norm is {GRADIENT_GROWTH:g} times its median.", "train/grad_norm", step)


def grown(curve: Curve) -> float | None:
    """The last step with a value far above the median of all, among the last ones; None without."""
    if len(curve.value) <= RECENT:
        return None
    far = np.flatnonzero(curve.value[-RECENT:] > GRADIENT_GROWTH * max(float(np.median(curve.value)), 1e-12))
    return float(curve.rollout[len(curve.value) - RECENT + far[-1]]) if len(far) else None


def found_in_events(events: Mapping[str, int], failed: int) -> Iterable[dict[str, Any]]:
    if lost := events.get("engine_lost", 0):
        back = events.get("engine_recovered", 0)
        yield finding("notice" if back >= lost else "serious", f"{lost} engines were lost, {back} are back.")
    if failed:
        yield finding("notice", f"{failed} samples failed for good.")
    if held := events.get("loop_held", 0):
        yield finding("notice", f"Code that does not await blocked the event loop {held} times.")


def most_memory(times: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int | None]]:
    """The most bytes that were measured at once of the host and of any GPU, and how many there are."""
    most: dict[str, tuple[int, int | None]] = {}
    for line in times:
        for what, (used, there) in line.get("memory", {}).items():
            row = HOST if what == HOST else FULLEST_GPU
            if used > most.get(row, (0, None))[0]:
                most[row] = int(used), there
    return most


def planned_memory(run: OpenRun) -> tuple[dict[str, int], str | None]:
    """Bytes of the host and of the fullest GPU by view/plan.json, what `slime plan --json` prints; and what is missing."""
    path = run.view.plan
    try:
        plan = json.loads(path.read_text())
        of_devices = [int(group["needed_bytes"]) for group in plan["groups"]]
        of_host = sum(int(group["host_bytes"] or 0) for group in plan["groups"])
        on_cpu = plan["target"]["device"] == "cpu"
    except FileNotFoundError:
        minutes = AFTER_S / 60
        return {}, (
            f"No plan is there. A run writes it after {minutes:g} minutes, where slime-preflight is installed; this writes it "
            f"now: slime plan {run.folder.config} --json > {path}"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{path} is no plan: {type(error).__name__}: {error}"
    if on_cpu:
        return {HOST: sum(of_devices) + of_host}, None
    return {FULLEST_GPU: max(of_devices, default=0), HOST: of_host}, None
