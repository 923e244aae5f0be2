"""Driver of the kernel's buffer filter."""

from __future__ import annotations

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.filter import BufferFilter, BufferFilterDriver


class PopFirst(BufferFilterDriver):
    """Chooses the items that wait longest."""

    @classmethod
    def build(cls, config: DriverConfig) -> BufferFilter:
        from slime_core.data.pop_first import PopFirstFilter

        return PopFirstFilter()
