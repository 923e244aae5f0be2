"""Supervision: who brings a run's lost engines back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.transport import EngineLink
from slime_core.controller.session import Session
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.supervisor import Admit, EngineSupervisor, HealthRules, Resync
from slime_core.workers.colocation import Residency
from slime_core.workers.launcher import Launcher


def supervisors(session: Session, launcher: Launcher) -> list[EngineSupervisor]:
    """One for the policy's engines, and one for those of every model that is served beside it."""

    def of(
        client: EngineClient,
        restart: Callable[[int], Awaitable[tuple[EngineHandle, EngineInfo]]],
        resync: Resync,
        first: int,
        room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        leaves: Callable[[asyncio.Future[None]], None] = lambda gone: None,
    ) -> EngineSupervisor:
        return EngineSupervisor(
            client,
            HealthRules.of(session.run.config.rollout),
            end=launcher.end_engine,
            leaves=leaves,
            restart=restart,
            resync=resync,
            room=room,
            hooks=session.hooks,
            run=session.event,
            rollout_id=lambda: session.state.rollout_id,
            counts=session.faults,
            first=first,
        )

    found = []
    if session.client is not None:
        restart = partial(restart_settled, launcher, session.client, session.residency)
        residency = session.residency
        found.append(of(session.client, restart, session.resync, 0, residency.starting, residency.leaves))

    async def bring_nothing(engine: EngineLink, admit: Admit) -> None:
        await admit(None)

    for served in session.served_engines:
        restart = partial(restart_served, launcher, served)
        found.append(of(served.client, restart, bring_nothing, served.first_index))
    return found


async def restart_settled(
    launcher: Launcher, client: EngineClient, residency: Residency, index: int
) -> tuple[EngineHandle, EngineInfo]:
    """See `Launcher.restart_engine`; on devices that it shares the engine sleeps."""
    engine, info = await launcher.restart_engine(index)
    await residency.settle(client.link(engine))
    return engine, info


async def restart_served(launcher: Launcher, served: ServedEngines, index: int) -> tuple[EngineHandle, EngineInfo]:
    """See `Launcher.restart_engine`; whoever asks these engines finds the new one."""
    engine, info = await launcher.restart_engine(index)
    served.replaced(index, info)
    return engine, info
