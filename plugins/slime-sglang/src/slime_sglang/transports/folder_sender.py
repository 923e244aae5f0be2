"""FolderSender: what the transports that write weights to a folder have in common."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts.transport import SenderSetup
from slime_sglang.transports import folder
from slime_sglang.transports.sender import ServerSender


class FolderSender(ServerSender):
    """The first rank writes below `RUN/weights`. At the end nothing is left: engines have what they read in memory, and an
    attempt after this one brings its own."""

    _root: Path | None = None
    """On the rank that writes."""

    def setup(self, setup: SenderSetup) -> None:
        super().setup(setup)
        if setup.rank == 0:
            self._root = setup.run_dir / "weights"
            # What an attempt before this one left is of other weights.
            folder.clear_all_but(self._root, [])

    def close(self) -> None:
        super().close()
        if self._root is not None:
            folder.clear(self._root)
            self._root = None
