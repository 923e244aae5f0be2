"""TargetBatch: a batch of datums with `targets`, for whose calls the trainers predict the tokens of prompts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields

from slime_core import groups as entry_groups
from slime_core.controller.learner import LearnerBatch
from slime_core.controller.session import Session
from slime_core.errors import ConfigError, DataError
from slime_session.datum import Datum
from slime_session.named_plugins import those_with
from slime_training.prompt_targets import PromptTargets


class TargetBatch(LearnerBatch):
    """Its response tokens are targets (`PromptTargetsBackend`)."""

    @classmethod
    def of(cls, batch: LearnerBatch) -> TargetBatch:
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)})


def have_targets(session: Session, datums: Sequence[Datum]) -> bool:
    """DataError if only some have; ConfigError for a backend that cannot compute them."""
    lacking = [place for place, datum in enumerate(datums) if datum.targets is None]
    if len(lacking) == len(datums):
        return False
    if lacking:
        raise DataError(f"datums[{lacking[0]}] has no targets, and others have: give them for all, or for none.")
    run = session.run
    if not issubclass(run.backend.driver, PromptTargets):
        raise ConfigError(
            f'datums[0].targets: backend "{run.backend.entry.name}" computes one target at a position, the next token. '
            f"Backends that compute several: {those_with(run, entry_groups.BACKENDS, PromptTargets)}."
        )
    return True


@contextlib.asynccontextmanager
async def predicting(session: Session, batch: LearnerBatch) -> AsyncIterator[None]:
    """Around the trainers' calls with this batch."""
    if not isinstance(batch, TargetBatch):
        yield
        return
    await session.policy.call_all("of_backend", "predict_prompts", True)
    try:
        yield
    finally:
        await session.policy.call_all("of_backend", "predict_prompts", False)
