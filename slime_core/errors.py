"""Error classes. A `SlimeError` can be fixed by the user: its text has the key, its value, what is wrong, and what to type.
The command line prints it as one paragraph and exits with `exit_code`; any other exception is a bug and keeps its
traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class SlimeError(Exception):
    """Base of all errors for the user."""

    exit_code = 1


class ConfigError(SlimeError):
    """The run file, a flag or a plugin option is wrong. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PluginError(SlimeError):
    """A plugin is missing, broken, registered twice, or built for another version of the contracts."""

    exit_code = 2


class DataError(SlimeError):
    """A data file or a row of one cannot be used."""

    exit_code = 3


class ModelError(SlimeError):
    """A model folder or a tokenizer cannot be used as requested."""

    exit_code = 3


class RewardError(SlimeError):
    """A reward raised, ran out of time, or returned something that is not a finite number."""

    exit_code = 4
    outcome = "wrong"
    """Value of `slime_core.contracts.reward.Outcome`."""


class RewardTimeout(RewardError):
    """A reward, or a service that it uses, gave no response in time."""

    outcome = "timeout"


class RewardUnavailable(RewardError):
    """A dependency of a reward failed, such as a service; the sample itself may be right or wrong."""

    outcome = "infra"


class RolloutError(SlimeError):
    """Generation cannot provide the groups that a step needs."""

    exit_code = 4


class RolloutsExhausted(RolloutError):
    """There are no more groups: the filters reject all of them, or the prompts have ended."""


class EngineError(SlimeError):
    """A rollout engine died, hung, or returned an invalid response."""

    exit_code = 5


class EngineRefused(EngineError):
    """A healthy engine got a request that it does not support. Another one would refuse it too."""


class EngineUnavailable(EngineError):
    """No engine accepted the request, or its engine was lost before any response: the same request may be sent again."""


class TrainingError(SlimeError):
    """A training step cannot continue, for example after too many non-finite steps in a row."""

    exit_code = 6


class NonfiniteWeights(TrainingError):
    """After an optimizer step, a weight or the optimizer's state is not finite: the weights that the trainers have are lost."""


class RankTimeout(TrainingError):
    """A trainer rank has not ended a call in time. What it holds cannot be saved, and its thread may never end."""


class CheckpointError(SlimeError):
    """A checkpoint is missing, cut short, or belongs to another run."""

    exit_code = 7


class StorageError(SlimeError):
    """A file could not be written, most often because the disk is full."""

    exit_code = 8


class Interrupted(SlimeError):
    """The user pressed Ctrl-C; finished steps are saved."""

    exit_code = 130


class Terminated(Interrupted):
    """The run got SIGTERM; finished steps are saved."""

    exit_code = 143


class HungUp(Interrupted):
    """The terminal was closed (SIGHUP); finished steps are saved."""

    exit_code = 129


def near_matches(asked: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that look like `asked`, best first; `-` and `_` count as the same character."""
    spelled = {name.replace("-", "_").lower(): name for name in known}
    found = difflib.get_close_matches(asked.replace("-", "_").lower(), spelled, n=3, cutoff=0.6)
    return [spelled[name] for name in found]


def unknown_name(where: str, asked: str, kind: str, known: Sequence[str], *, listing: str = "", hint: str = "") -> str:
    """Message for an unknown name. listing: replaces the plain list of known names; hint: added at the end.

    >>> unknown_name("rollout.order", "randon", "order", ["random", "sorted"])
    'rollout.order = "randon": unknown order; close match: random. Available: random, sorted.'
    """
    close = near_matches(asked, known)
    matched = f"; close match: {', '.join(close)}" if close else ""
    available = listing or ", ".join(known) or "none"
    return f'{where} = "{asked}": unknown {kind}{matched}. Available: {available}.{hint and " " + hint}'
