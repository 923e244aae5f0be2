"""TrainerStates: the trainers' state and weights in folders of one's own, as coroutines in the run's event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from slime_core import groups as entry_groups
from slime_core.atomic_io.storage import written
from slime_core.config.bound import BoundRun
from slime_core.errors import ConfigError
from slime_core.workers.train_group import TrainGroup
from slime_session.named_plugins import those_with
from slime_session.own_loop import OwnLoop, learner_of, require_own_weights
from slime_session.stored_weights import StoredWeights, write_weights
from slime_training.replaced_folder import replaced_folder
from slime_training.restartable import Restartable


class TrainerStates:
    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop
        self._session = loop.session

    async def save_weights(self, folder: Path) -> Path:
        session = self._session
        require_own_weights(session.run, "save_weights")
        learner_of(session)
        if isinstance(session.transport, StoredWeights) and session.transport.folder == folder:
            raise ConfigError(
                f"save_weights: engines sample with {folder}, and one that is restarted would read other weights there. Choose "
                "another folder, or call update_weights first."
            )
        await self._loop.between_steps("save_weights")
        async with session.colocation.train(), session.policy.turn():
            await write_weights(session.policy, folder)
        return folder

    async def load_weights(self, folder: Path) -> None:
        session = self._session
        stored = StoredWeights(folder)
        if session.transport is None:
            raise ConfigError("load_weights: this run has no engine that takes weights.")
        await self._loop.ready_for_weights("load_weights")
        # Another version than any that engines have cached prefixes of.
        session.state = replace(session.state, version=session.state.version + 1)
        # As the run's transport, so that engines which are restarted get these weights too.
        earlier, session.transport = session.transport, stored
        try:
            await self._loop.weights.update()
        except BaseException:
            session.transport = earlier
            raise

    async def save_state(self, folder: Path) -> Path:
        session = self._session
        self._require_policy_alone("save_state")
        await self._loop.between_steps("save_state")
        with written(folder), replaced_folder(folder) as aside:
            async with session.colocation.train(), session.policy.turn():
                await session.policy.save(aside)
        return folder

    async def load_state(self, folder: Path, optimizer: bool) -> None:
        async with self._beginning_again("load_state") as policy:
            await policy.call_all("of_backend", "new_optimizer")
            await policy.load(folder)
            if not optimizer:
                await policy.call_all("of_backend", "new_optimizer")

    async def restart(self) -> None:
        async with self._beginning_again("restart") as policy:
            await policy.call_all("of_backend", "restart")

    @contextlib.asynccontextmanager
    async def _beginning_again(self, call: str) -> AsyncIterator[TrainGroup]:
        self._require_policy_alone(call)
        require_restartable(self._session.run, call)
        async with self._loop.beginning_again() as policy:
            yield policy

    def _require_policy_alone(self, call: str) -> None:
        """ConfigError for runs whose state is more than the policy's."""
        session = self._session
        require_own_weights(session.run, call)
        learner_of(session)
        if len(session.roles) > 1:
            raise ConfigError(
                f"{call}: this run trains {', '.join(session.roles)}, and {call} is of a policy alone. Call save, and open "
                "the session again to continue from it."
            )


def require_restartable(run: BoundRun, call: str) -> None:
    """ConfigError for a backend whose trainers begin only with the run."""
    if not issubclass(run.backend.driver, Restartable):
        raise ConfigError(
            f'{call}: trainers of backend "{run.backend.entry.name}" begin again only with the run. Backends where they do: '
            f"{those_with(run, entry_groups.BACKENDS, Restartable)}."
        )
