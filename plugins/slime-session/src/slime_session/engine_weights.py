"""EngineWeights: weight updates of a session, and whether the last one was cut short."""

from __future__ import annotations

from slime_core.controller.session import Session
from slime_core.errors import TrainingError


class EngineWeights:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_cut = False

    async def update(self) -> None:
        """See `Session.update_weights`."""
        try:
            await self._session.update_weights()
        except BaseException:
            # Engines are paused then, with weights that are in part the earlier ones.
            self._is_cut = True
            raise
        self._is_cut = False

    def require_whole(self, call: str) -> None:
        """TrainingError where a request would wait for ever, or be sampled with weights of two versions."""
        if self._is_cut:
            raise TrainingError(
                f"{call}: an error or an interrupt cut a weight update short: engines are paused, and their weights may be in "
                "part the earlier ones. Call update_weights, or load_weights, first."
            )
