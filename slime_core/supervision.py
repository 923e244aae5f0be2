"""Supervision: who brings a run's lost engines back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.transport import EngineLink
from slime_core.launch.launcher import Launcher
from slime_core.rollout.client import EngineClient
from slime_core.rollout.seat import EngineHandle
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.supervisor import Admit, EngineSupervisor, HealthRules, Resync
from slime_core.session import Session


def supervisors(session: Session, launcher: Launcher) -> list[EngineSupervisor]:
    """One for the policy's engines, and one for those of every model that is served beside it."""

    def of(
        client: EngineClient,
        restart: Callable[[int], Awaitable[tuple[EngineHandle, EngineInfo]]],
        resync: Resync,
        first: int,
    ) -> EngineSupervisor:
        return EngineSupervisor(
            client,
            HealthRules.of(session.run.config.rollout),
            restart=restart,
            resync=resync,
            hooks=session.hooks,
            run=session.event,
            rollout_id=lambda: session.state.rollout_id,
            counts=session.faults,
            first=first,
        )

    found = []
    if session.client is not None:
        found.append(of(session.client, launcher.restart_engine, session.resync, 0))

    async def bring_nothing(engine: EngineLink, admit: Admit) -> None:
        await admit(None)

    for served in session.served_engines:
        restart = partial(restart_served, launcher, served)
        found.append(of(served.client, restart, bring_nothing, served.first_index))
    return found


async def restart_served(launcher: Launcher, served: ServedEngines, index: int) -> tuple[EngineHandle, EngineInfo]:
    """See `Launcher.restart_engine`; whoever asks these engines finds the new one."""
    engine, info = await launcher.restart_engine(index)
    served.replaced(index, info)
    return engine, info
