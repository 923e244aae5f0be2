"""What drivers of backends and engines declare of adapters. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Any


class AdapterHolder:
    """A base beside `BackendDriver`, for backends that are an `AdapterBackend`."""

    @classmethod
    def max_adapters(cls, config: Any) -> int:
        """How many adapters these options hold at a time over the frozen base; 0: they train the weights themselves."""
        return 0


class AdapterSampler:
    """A base beside `EngineDriver`, for engines that are an `AdapterEngine`."""

    @classmethod
    def max_adapters(cls, config: Any) -> int:
        """How many adapters these options hold at a time; 0: none."""
        return 0

    @classmethod
    def draws_by_seed(cls, config: Any, device: str) -> bool:
        """Whether a request's seed alone decides its draws. device: cpu or cuda."""
        return True
