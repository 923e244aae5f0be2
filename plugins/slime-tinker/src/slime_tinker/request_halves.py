"""Done and Rest: the second half of a request, which follows what the trainers do (see training.py), and its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime_tinker.journal import Statement
from slime_tinker.records import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    outcome: Outcome
    """What the client gets."""
    statements: Sequence[Statement] = ()
    """Written beside it."""
    replaced: str | None = None
    """Folder to which nothing refers once they are."""


Rest: TypeAlias = Callable[[], Coroutine[Any, Any, Done]]
"""What follows the trainers' half. SlimeError for what fails."""


def rest_of(outcome: Outcome) -> Rest:
    """Nothing but the result."""

    async def rest() -> Done:
        return Done(outcome=outcome)

    return rest
