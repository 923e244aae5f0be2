"""FolderSender: the base class of transports that write weights to a folder."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts.transport import SenderSetup
from slime_sglang.transports import folder
from slime_sglang.transports.sender import ServerSender


class FolderSender(ServerSender):
    """The first rank writes to `RUN/weights`. `close` removes the files: engines have the weights in memory, and a later
    attempt of the run writes its own."""

    _root: Path | None = None
    """Set on the rank that writes."""

    def setup(self, setup: SenderSetup) -> None:
        super().setup(setup)
        if setup.rank == 0:
            self._root = setup.run_dir / "weights"
            # Files of an earlier attempt have other weights.
            folder.clear_all_but(self._root, [])

    def close(self) -> None:
        super().close()
        if self._root is not None:
            folder.clear(self._root)
            self._root = None
