"""Replies: the data of each address of the page, as plain values and arrays."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.registry.boundary import error_text, held
from slime_viewer.comparison import compare_page
from slime_viewer.config_keys import config_difference, config_page
from slime_viewer.health import health
from slime_viewer.metric_log import in_buckets
from slime_viewer.metric_meanings import meaning_of
from slime_viewer.not_there import NotThere
from slime_viewer.open_run import OpenRun
from slime_viewer.panel import InstalledPanel
from slime_viewer.run_events import event_page
from slime_viewer.run_list import RunList
from slime_viewer.sample_numbers import COUNT, PART
from slime_viewer.sample_page import sample_page
from slime_viewer.sample_set import SampleSet
from slime_viewer.sample_table import Asked, Chosen
from slime_viewer.search_words import EXCERPT, SearchWords
from slime_viewer.timeline import timeline
from slime_viewer.view_folder import TRAIN

MOST_ROWS: Final = 1_000
"""Rows of a reply."""
DISTRIBUTION: Final = "slime-viewer"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of an address. ConfigError for one that cannot be read."""

    given: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        return self.given.get(name, default)

    def number(self, name: str, default: float | None = None) -> float | None:
        text = self.given.get(name)
        if text is None or text == "":
            return default
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}={text}: no number.") from None

    def whole(self, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
        number = self.number(name, default)
        if number is None or number != int(number) or number < least:
            raise ConfigError(f"{name}={self.text(name)}: no whole number of at least {least}.")
        return int(number) if most is None else min(int(number), most)

    def step(self) -> int | None:
        """None: the last one."""
        return None if self.text("step", "last") == "last" else self.whole("step", 0, least=-1)


@dataclass(frozen=True, slots=True)
class Page:
    """What replies are made from."""

    runs: RunList
    panels: Mapping[str, InstalledPanel]
    exported: bool = False

    def list_runs(self, _: Parameters) -> dict[str, Any]:
        return {
            "version": version(DISTRIBUTION),
            "runs": [run.summary() for run in self.runs],
            "panels": [panel.info() for panel in self.panels.values()],
            "exported": self.exported,
        }

    def changes(self, parameters: Parameters) -> dict[str, Any]:
        """The cursor is a short hash of the state of each part of each run."""
        known = set(parameters.text("cursor").split("."))
        marks = {
            (run.id, part): hashlib.blake2s(f"{run.id}/{part}/{mark}".encode(), digest_size=6).hexdigest()
            for run in self.runs
            for part, mark in run.marks().items()
        }
        changed: dict[str, list[str]] = {}
        if parameters.text("cursor"):
            for (run_id, part), mark in marks.items():
                if mark not in known:
                    changed.setdefault(run_id, []).append(part)
        return {
            "cursor": ".".join(marks.values()),
            "changed": [{"run": run_id, "parts": parts} for run_id, parts in changed.items()],
        }

    def config_difference(self, parameters: Parameters) -> dict[str, Any]:
        return config_difference(self.runs.named(parameters.text("runs")))

    def compare(self, parameters: Parameters) -> dict[str, Any]:
        return compare_page(self.runs.named(parameters.text("runs")))

    def panel(self, run: OpenRun, name: str) -> dict[str, Any]:
        """NotThere, with what there is; PluginError if the panel's function fails."""
        if name not in self.panels:
            raise NotThere(f"no panel {name!r}; there are {', '.join(self.panels) or 'none'}.")
        installed = self.panels[name]
        data = None
        with held() as failed:
            data = installed.panel.data(run.path)
        if failed.raised is not None:
            raise PluginError(f'panel "{name}" of {installed.origin}: {error_text(failed.raised)}.') from failed.raised
        return {"data": data}


def metric_names(run: OpenRun, _: Parameters) -> dict[str, Any]:
    with run.lock:
        run.refresh()
        found = []
        for axis, name in run.metrics.names():
            values = run.metrics.axes[axis].of(name)
            there = values[~np.isnan(values)]
            last = float(there[-1]) if len(there) else None
            found.append({"name": name, "axis": axis, "last": last, "points": len(there), "meaning": meaning_of(name)})
    return {"metrics": found}


def series(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    points = parameters.whole("points", 2000, least=2)
    names = [name for name in parameters.text("names").split(",") if name]
    found = {}
    with run.lock:
        run.refresh()
        for name in names:
            if (curve := run.metrics.curve(name)) is None:
                continue
            at, value, low, high = in_buckets(curve, points)
            attempts = np.flatnonzero(np.diff(curve.attempt[at])) + 1
            found[name] = {
                "axis": curve.axis,
                "step": curve.step[at],
                "tokens": None if curve.tokens is None else curve.tokens[at],
                "hours": None if curve.hours is None else curve.hours[at],
                "value": value,
                "low": low,
                "high": high,
                "attempts": attempts,
            }
    return {"series": found}


def sample_set(run: OpenRun, parameters: Parameters) -> SampleSet:
    """NotThere if the run has none of that name."""
    try:
        found = run.sample_set(parameters.text("set", TRAIN))
    except ConfigError as error:
        raise NotThere(str(error)) from None
    found.refresh()
    return found


def steps(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    """A set that is not there, in a run without any, is an empty reply: the page states it."""
    sets = run.sets()
    if not sets and parameters.text("set", TRAIN) == TRAIN:
        none: dict[str, list[Any]] = {"step": [], "samples": [], "groups": [], "reward": []}
        return {"sets": [], "set": TRAIN, **none, "unreadable": [], "parts": [], "counts": []}
    if sets and "set" not in parameters.given:
        parameters = Parameters({**parameters.given, "set": sets[0]})
    found = sample_set(run, parameters)
    for step in list(found.files)[-1:]:
        if step not in found.unreadable and found.table.key_of(step) is None:
            known_or_unreadable(found, step)
    rows = {step: row for row, step in enumerate(found.table.step_summary()["step"])}
    summary = found.table.step_summary()
    listed = [step for step in found.files if step not in found.unreadable]

    def column(name: str, unknown: Any) -> list[Any]:
        return [summary[name][rows[step]] if step in rows else unknown for step in listed]

    return {
        "sets": sets,
        "set": found.name,
        "step": listed,
        "samples": column("samples", 0),
        "groups": column("groups", 0),
        "reward": column("reward", None),
        "unreadable": [{"step": step, "problem": problem} for step, problem in sorted(found.unreadable.items())],
        "parts": found.table.names(PART),
        "counts": found.table.names(COUNT),
    }


def known_or_unreadable(found: SampleSet, step: int) -> None:
    """Indexes a step; that it cannot be read is in the set's list."""
    try:
        found.need(step)
    except DataError:
        return


def one_step(found: SampleSet, step: int | None) -> int:
    """The step, or the last one, indexed."""
    if step is None:
        step = found.last_step()
    elif step not in found.files:
        raise NotThere(missing_step(found, step))
    found.need(step)
    return step


def missing_step(found: SampleSet, step: int) -> str:
    known = (
        f"there are {len(found.files)}, {min(found.files)} to {max(found.files)}" if found.files else "there is none"
    )
    return f"step {step} of {found.name} is not there; {known}."


def asked_of(parameters: Parameters, step: int | None, sort: str) -> Asked:
    group = parameters.number("group")
    return Asked(
        step=step,
        group=None if group is None else int(group),
        words=SearchWords.read(parameters.text("q")),
        where=parameters.text("where"),
        sort=parameters.text("sort", sort),
        descending=parameters.text("descending", "0") not in ("0", "false"),
        offset=parameters.whole("offset", 0),
        limit=parameters.whole("limit", 100, least=1, most=MOST_ROWS),
    )


def named_columns(chosen: Chosen) -> dict[str, dict[str, list[Any]]]:
    return {
        key: {name.removeprefix(prefix): values for name, values in chosen.rows.items() if name.startswith(prefix)}
        for key, prefix in (("parts", PART), ("counts", COUNT))
    }


def groups(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    began = time.perf_counter()
    found = sample_set(run, parameters)
    step = one_step(found, parameters.step())
    asked = asked_of(parameters, step, "group")
    chosen = found.table.groups(asked)
    names = (
        "group", "samples", "reward", "lowest", "highest", "spread", "tokens", "longest", "truncated", "oldest", "newest",
        "advantage", "mismatch", "entropy",
    )  # fmt: skip
    return {
        "set": found.name,
        "step": step,
        "total": chosen.total,
        "offset": asked.offset,
        "took": 1000 * (time.perf_counter() - began),
        "prompt": [last_words(prompt) for prompt, _ in chosen.texts],
        **{name: chosen.rows.get(name, []) for name in names},
        **named_columns(chosen),
    }


def samples(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    began = time.perf_counter()
    found = sample_set(run, parameters)
    step = None if parameters.text("step", "all") == "all" else one_step(found, parameters.step())
    if step is None and not found.table.rows and found.files:
        one_step(found, None)
    asked = asked_of(parameters, step, "step")
    chosen = found.table.samples(asked)
    rows = chosen.rows
    excerpts = [asked.words.excerpt(response) for _, response in chosen.texts]
    names = (
        "group", "reward", "tokens", "trained", "status", "oldest", "newest", "log_prob", "advantage", "mismatch", "entropy",
    )  # fmt: skip
    keys = zip(*(rows.get(name, []) for name in ("step", "index", "part")), strict=True)
    indexed = found.table.rows
    return {
        "set": found.name,
        "step": step,
        "total": chosen.total,
        "exact": chosen.exact,
        "offset": asked.offset,
        "took": 1000 * (time.perf_counter() - began),
        "indexed": indexed,
        "rows": indexed if found.is_complete else max(indexed + 1, round(indexed / max(found.share_indexed, 1e-9))),
        "at": [{"step": step, "index": index, "part": part} for step, index, part in keys],
        "prompt": [last_words(prompt) for prompt, _ in chosen.texts],
        "excerpt": [text for text, _ in excerpts],
        "marks": [marks for _, marks in excerpts],
        **{name: rows.get(name, []) for name in names},
        **named_columns(chosen),
    }


def last_words(prompt: str) -> str:
    """The end of a prompt: what is before it is often the same in all."""
    text = " ".join(prompt[-4 * EXCERPT :].split())
    return text if len(text) <= EXCERPT else "..." + text[-EXCERPT:]


def sample(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    found = sample_set(run, parameters)
    step = None
    if "step" in parameters.given:
        step = one_step(found, parameters.step())
    index, part = parameters.whole("index", -1), parameters.whole("part", 0)
    if index < 0:
        raise ConfigError("index: which sample is asked for? Its number is missing.")
    return sample_page(run, found, index, part, step)


def timeline_page(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    run.refresh()
    return timeline(run, parameters.number("start"), parameters.number("end"), parameters.whole("spans", 5000, least=1))


def health_page(run: OpenRun, _: Parameters) -> dict[str, Any]:
    run.refresh()
    return health(run)


def events(run: OpenRun, parameters: Parameters) -> dict[str, Any]:
    with run.lock:
        run.refresh()
        return event_page(
            run.events, parameters.whole("offset", 0), parameters.whole("limit", 200, least=1, most=MOST_ROWS)
        )


def config(run: OpenRun, _: Parameters) -> dict[str, Any]:
    return config_page(run)


OF_RUN: Final[Mapping[str, Callable[[OpenRun, Parameters], dict[str, Any]]]] = {
    "config": config,
    "metrics": metric_names,
    "series": series,
    "steps": steps,
    "groups": groups,
    "samples": samples,
    "sample": sample,
    "timeline": timeline_page,
    "health": health_page,
    "events": events,
}
"""Below `/api/runs/{id}/`."""
