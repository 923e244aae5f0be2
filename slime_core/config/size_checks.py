"""Numbers that no machine can hold: found before anything is started, not when memory has run out."""

from __future__ import annotations

import os
from collections.abc import Iterable

from slime_core.config.bound import BoundRun

KIB, MIB = 2**10, 2**20


def sizes(run: BoundRun) -> Iterable[str]:
    """What this process keeps at once, at the very least, against the memory of its machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rollout, launcher = run.config.rollout, run.config.launcher
    wave = "rollout_batch_size" if rollout.over_sampling_batch_size is None else "over_sampling_batch_size"
    ahead = f" x (max_async_level {rollout.max_async_level} + 1)" if rollout.max_async_level else ""
    samples = rollout.wave * rollout.n_samples_per_prompt * (rollout.max_async_level + 1)
    asked = f"rollout: {wave} {rollout.wave} x n_samples_per_prompt {rollout.n_samples_per_prompt}{ahead}"
    rows = [
        (asked, samples, "samples", KIB),
        ("rollout.reward_workers", rollout.reward_workers, "processes", 16 * MIB),
        ("launcher.rollout_num_gpus", launcher.num_engines, "engines", MIB),
        *((f"engines.{row.name}.num_gpus", row.num_engines, "engines", MIB) for row in run.served),
        *((f"{role.name}: ranks", role.num_ranks, "trainer ranks", MIB) for role in run.roles),
        *((f"eval {one.name}: responses to a prompt", one.num_samples, "samples", KIB) for one in run.evals),
    ]
    for asked, count, what, each in rows:
        if count * each > memory:
            yield (
                f"{asked} = {count:,} {what}: this process needs at least {count * each / 2**30:,.0f} GiB for them, and this "
                f"machine has {memory / 2**30:,.0f}. Pass a smaller number."
            )
