"""The health monitors of a run, which restart its lost engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.transport import EngineGroup
from slime_core.controller.session import Session
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_health_monitor import Admit, EngineHealthMonitor, HealthRules, UpdateEngineWeights
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.rollout.served_engines import ServedEngines
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.launcher import Launcher


def health_monitors(session: Session, launcher: Launcher) -> list[EngineHealthMonitor]:
    """One for the policy's engines, and one for those of every model that is served beside it."""

    def of(
        client: EngineClient,
        restart: Callable[[int], Awaitable[tuple[EngineHandle, EngineInfo]]],
        update_engine_weights: UpdateEngineWeights,
        first: int,
        room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        leaves: Callable[[asyncio.Future[None]], None] = lambda gone: None,
    ) -> EngineHealthMonitor:
        return EngineHealthMonitor(
            client,
            HealthRules.of(session.run.config.rollout),
            end=launcher.end_engine,
            leaves=leaves,
            restart=restart,
            update_engine_weights=update_engine_weights,
            room=room,
            hooks=session.hooks,
            run=session.event,
            rollout_id=lambda: session.state.rollout_id,
            counts=session.faults,
            first=first,
        )

    found = []
    if session.client is not None:
        restart = partial(restart_settled, launcher, session.client, session.colocation)
        colocation = session.colocation
        found.append(
            of(session.client, restart, session.update_engine_weights, 0, colocation.starting, colocation.leaves)
        )

    async def keep_weights(engine: EngineGroup, admit: Admit) -> None:
        await admit(None)

    for served in session.served_engines:
        restart = partial(restart_served, launcher, served)
        found.append(of(served.client, restart, keep_weights, served.first_index))
    return found


async def restart_settled(
    launcher: Launcher, client: EngineClient, colocation: ColocationManager, index: int
) -> tuple[EngineHandle, EngineInfo]:
    """See `Launcher.restart_engine`; on shared devices the engine is offloaded afterwards."""
    engine, info = await launcher.restart_engine(index)
    await colocation.settle(client.link(engine))
    return engine, info


async def restart_served(launcher: Launcher, served: ServedEngines, index: int) -> tuple[EngineHandle, EngineInfo]:
    """See `Launcher.restart_engine`; later requests find the new engine."""
    engine, info = await launcher.restart_engine(index)
    served.replaced(index, info)
    return engine, info
