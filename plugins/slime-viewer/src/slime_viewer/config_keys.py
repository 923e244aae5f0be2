"""The config of a run as keys such as `train.lr`, and what differs between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slime_viewer.open_run import OpenRun

MISSING: Final = object()


def config_page(run: OpenRun) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/config`."""
    manifest = run.manifest()
    return {
        "values": flat(run.config),
        "plugins": manifest.get("plugins", {}),
        "libraries": manifest.get("libraries", {}),
        "slime": manifest.get("slime_core"),
        "python": manifest.get("python"),
    }


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tables become keys with dots; lists and empty tables are values."""
    return dict(sorted(leaves(config)))


def leaves(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def config_difference(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """The reply to `/api/config-difference`."""
    configs = [flat(run.config) for run in runs]
    keys = [
        key
        for key in sorted({key for config in configs for key in config})
        if any(config.get(key, MISSING) != configs[0].get(key, MISSING) for config in configs[1:])
    ]
    return {
        "runs": [run.id for run in runs],
        "keys": keys,
        "values": [[config.get(key) for config in configs] for key in keys],
        "there": [[key in config for config in configs] for key in keys],
    }
