"""The entry-point groups: which names a distribution can register, and the pluggy group for observers."""

from typing import Final

BACKENDS: Final = "slime.backends"
ENGINES: Final = "slime.engines"
ALGORITHMS: Final = "slime.algorithms"
ADVANTAGES: Final = "slime.advantages"
LOSSES: Final = "slime.losses"
KL: Final = "slime.kl"
CORRECTIONS: Final = "slime.corrections"
REWARDS: Final = "slime.rewards"
FILTERS: Final = "slime.filters"
GENERATORS: Final = "slime.generators"
COLLECTORS: Final = "slime.collectors"
SOURCES: Final = "slime.sources"
RENDERERS: Final = "slime.renderers"
MIDDLEWARES: Final = "slime.middlewares"
TRANSPORTS: Final = "slime.transports"
TRACKERS: Final = "slime.trackers"
CONVERTERS: Final = "slime.converters"
LAUNCHERS: Final = "slime.launchers"
OPTIMIZERS: Final = "slime.optimizers"
MEDIA: Final = "slime.media"
COMMANDS: Final = "slime.commands"
"""Subcommands of `slime`; an entry is a `typer.Typer`."""
PANELS: Final = "slime.panels"
"""Parts of the page that shows runs."""
LIBRARY: Final = "slime.library"
"""Attributes of `slime_core`, and `rollout_workers`, that a distribution provides; an entry is a function."""
HOOKS: Final = "slime"
"""pluggy hook modules; every installed one is loaded."""

DRIVER_GROUPS: Final = (
    BACKENDS,
    ENGINES,
    ALGORITHMS,
    ADVANTAGES,
    LOSSES,
    KL,
    CORRECTIONS,
    REWARDS,
    FILTERS,
    GENERATORS,
    COLLECTORS,
    SOURCES,
    RENDERERS,
    MIDDLEWARES,
    TRANSPORTS,
    TRACKERS,
    CONVERTERS,
    LAUNCHERS,
    OPTIMIZERS,
    MEDIA,
)

NOUNS: Final = {
    BACKENDS: "backend",
    ENGINES: "engine",
    ALGORITHMS: "algorithm",
    ADVANTAGES: "advantage",
    LOSSES: "loss",
    KL: "KL estimator",
    CORRECTIONS: "correction",
    REWARDS: "reward",
    FILTERS: "filter",
    GENERATORS: "generator",
    COLLECTORS: "collector",
    SOURCES: "data source",
    RENDERERS: "prompt renderer",
    MIDDLEWARES: "router middleware",
    TRANSPORTS: "weight transport",
    TRACKERS: "tracker",
    CONVERTERS: "converter",
    LAUNCHERS: "launcher",
    OPTIMIZERS: "optimizer",
    MEDIA: "modality",
    COMMANDS: "command",
    PANELS: "panel",
    LIBRARY: "function of the library",
    HOOKS: "hook module",
}
"""The noun for an entry of each group, for error messages."""
