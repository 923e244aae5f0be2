"""Hooks of trainers: what other distributions have called in the processes of the trainer's ranks.

A distribution registers a driver in one of the two entry-point groups. A table of the run file (`backend.hooks`,
`sync.post_write_hook`) names it and has its options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_core.contracts.driver import Driver
from slime_core.errors import ConfigError
from slime_core.registry import Registry, bind
from slime_core.registry.boundary import foreign, with_name

if TYPE_CHECKING:
    from torch import nn

    from slime_core.contracts.setup import EngineEndpoint, TrainerSetup

TRAINER_HOOKS: Final = "slime_training.hooks"
"""Entry-point group of drivers that build a `TrainerHooks`."""
POST_WRITE_HOOKS: Final = "slime_training.post_write_hooks"
"""Entry-point group of drivers that build a `PostWriteHook`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HookedStep:
    """The optimizer step that begins. Gradients are zero."""

    rollout_id: int
    """Number of the rollout step, from 0."""
    step_id: int
    """Number of the optimizer step within it, from 0."""
    model: Sequence[nn.Module]
    """This rank's pieces, as the backend trains them."""
    optimizer: Any
    schedule: Any
    """The learning rates of this step are set already."""


class TrainerHooks:
    """Every rank calls them at the same moments. Each does nothing unless it is overridden."""

    def after_init(self, setup: TrainerSetup, options: Mapping[str, Any]) -> None:
        """Process groups exist and random generators are seeded; there is no model yet. options: all of the backend's, by name;
        None: not set."""

    def before_log_probs(self, model: Sequence[nn.Module], weights: str) -> None:
        """Before a forward over a batch without gradient, for log-probs or values. model: this rank's pieces, in evaluation
        mode, with the weights named `weights` (see `TrainBackend.forward_only`)."""

    def before_train_step(self, step: HookedStep) -> None:
        """May add to the gradients: a mean over data-parallel ranks of what is added joins the gradient of the loss."""


class PostWriteHook(ABC):
    @abstractmethod
    def __call__(self, folder: Path, engines: Sequence[EngineEndpoint]) -> None:
        """The rank that writes has written `folder`, a version of the weights, and `engines` load it when this returns."""


def bind_hooks(group: str, value: Any, *, where: str, base: Path | str | None) -> dict[str, Any] | None:
    """The table of a run file, or only a name, with the options of the driver that it names, checked. where: its key; base: the
    folder of relative paths. PluginError if nothing of that name is installed, ConfigError if an option is wrong."""
    if value is None:
        return None
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f'{where}: must be a table with a name, such as {{ name = "compat" }}.')
    resolved = Registry.from_environment().resolve(group, table["name"], where=f"{where}.name")
    options = {key: option for key, option in table.items() if key != "name"}
    bound = bind(resolved, options, where=where, base=None if base is None else Path(base))
    return {"name": table["name"], **bound.model_dump(mode="json")}


def build_hooks(group: str, table: Mapping[str, Any], *, where: str) -> Any:
    """The object of a table that `bind_hooks` has checked. Heavy imports happen here."""
    resolved = Registry.from_environment().resolve(group, table["name"], where=f"{where}.name")
    driver: type[Driver[Any]] = resolved.driver
    options = {key: option for key, option in table.items() if key != "name"}
    title = f'{where}.name = "{table["name"]}"'
    with foreign(title, "build"):
        return with_name(driver.build(bind(resolved, options, where=where)), title)
