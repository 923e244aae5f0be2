"""Backends that compute several targets at each position of a text: beside `TrainBackend`, for loops of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod


class PromptTargets:
    """A base beside `BackendDriver`, for backends that are a `PromptTargetsBackend`. Nothing heavy is imported here."""


class PromptTargetsBackend(ABC):
    """All ranks make the same calls in the same order."""

    @abstractmethod
    def predict_prompts(self, on: bool) -> None:
        """Until it is called with False: in the micro-batches of all calls the P K response tokens of a sample with P prompt
        tokens, K >= 1 of each sample's own, are K targets of each of the prompt's positions, position by position. None is an
        input, and a target at position p depends on the prompt's first p + 1 tokens."""
