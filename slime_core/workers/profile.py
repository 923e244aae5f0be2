"""Profiles of a trainer rank by torch's profiler and its record of CUDA memory. Neither changes a number."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from slime_core.atomic_io.storage import written

Target: TypeAlias = Literal["train_actor", "train_log_probs"]
"""The optimizer steps of a rollout step, or one forward over its batch without gradient."""
MEMORY_EVENTS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """Which calls of a rank are profiled, counted from the start of this attempt."""

    folder: Path
    targets: tuple[Target, ...] = ()
    """Empty: the profiler is off."""
    first: int = 0
    end: int = 0
    memory: bool = False
    """Record allocations of CUDA memory, and write them down when a call fails."""
    memory_steps: int | None = None
    """Calls of train after which a snapshot is written too."""


class Profile:
    """Profiles the calls of one rank. Files: ROLE-rankN-TARGET-CALL.json, which Perfetto and chrome://tracing show, and
    ROLE-rankN-memory-CALL.pickle for pytorch.org/memory_viz."""

    def __init__(self, plan: ProfilePlan, *, role: str, rank: int) -> None:
        self._plan = plan
        self._name = f"{role}-rank{rank}"
        self._calls: Counter[str] = Counter()
        if plan.memory:
            import torch

            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    @contextlib.contextmanager
    def around(self, target: Target) -> Iterator[None]:
        call = self._calls[target]
        self._calls[target] += 1
        try:
            if target in self._plan.targets and self._plan.first <= call < self._plan.end:
                with self._traced(target, call):
                    yield
            else:
                yield
        except Exception:
            self._snapshot(f"{call}-failed")
            raise
        if target == "train_actor" and call + 1 == self._plan.memory_steps:
            self._snapshot(str(call))

    @contextlib.contextmanager
    def _traced(self, target: Target, call: int) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile, supported_activities

        requested = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())  # type: ignore[no-untyped-call]
        with profile(activities=sorted(requested, key=str), record_shapes=True, profile_memory=True) as profiler:
            yield
        with written(self._plan.folder):
            self._plan.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._plan.folder / f"{self._name}-{target}-{call}.json"))

    def _snapshot(self, when: str) -> None:
        if not self._plan.memory:
            return
        import torch

        self._plan.folder.mkdir(parents=True, exist_ok=True)
        path = self._plan.folder / f"{self._name}-memory-{when}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
