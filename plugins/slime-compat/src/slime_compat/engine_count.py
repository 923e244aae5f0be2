"""get_rollout_num_engines: the number of engines, by which old functions multiply their limits."""

from __future__ import annotations

from typing import Any


def get_rollout_num_engines(args: Any) -> int:
    """`args.rollout_num_engines`, else counted from the devices in args; 0 if args name none."""
    given = getattr(args, "rollout_num_engines", None)
    if given is not None:
        return int(given)
    devices = getattr(args, "rollout_num_gpus", None) or 0
    return max(1, devices // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)) if devices > 0 else 0
