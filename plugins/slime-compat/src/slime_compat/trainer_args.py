"""TrainerArgs: the argument `args` of old hooks in trainer processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_compat.known_flags import ARGS_BY_DEFAULT
from slime_compat.old_args import OldArgs
from slime_core.contracts.setup import TrainerSetup


class TrainerArgs(OldArgs):
    """All hooks of a rank share it, and each sees what another has set. What upstream reads from it cannot be set, since the
    backend reads its own options."""

    __slots__ = ("_options",)

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values, where)
        object.__setattr__(self, "_options", frozenset({*values, *ARGS_BY_DEFAULT}))

    def start(self, setup: TrainerSetup, options: Mapping[str, Any]) -> None:
        """Adds the rank's place, and the options that the backend has, which win over the run file's list."""
        values = object.__getattribute__(self, "_values")
        values |= {name: value for name, value in options.items() if value is not None}
        values |= {
            "rank": setup.rank,
            "world_size": setup.world_size,
            "local_rank": setup.local_rank,
            "seed": setup.seed,
            "hf_checkpoint": str(setup.model_path),
        }
        object.__setattr__(self, "_options", object.__getattribute__(self, "_options") | set(values) | set(options))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in object.__getattribute__(self, "_options"):
            where = object.__getattribute__(self, "_where")
            raise AttributeError(
                f"args.{name} cannot be set: the backend does not read args. Set the option in the run file, and "
                f"{where}.{name} for what the function itself reads; attributes with other names may be set."
            )
        object.__getattribute__(self, "_values")[name] = value
