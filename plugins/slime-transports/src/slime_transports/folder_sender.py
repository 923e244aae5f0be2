"""FolderSender: the base class of transports that write weights to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup
from slime_core.registry.boundary import foreign
from slime_training.hooks import POST_WRITE_HOOKS, PostWriteHook, build_hooks
from slime_transports import folder
from slime_transports.config import SentConfig
from slime_transports.sender import ServerSender


class FolderSender(ServerSender):
    """The first rank writes to `RUN/weights`. `close` removes the files: engines have the weights in memory, and a later
    attempt of the run writes its own."""

    _root: Path | None = None
    """Set on the rank that writes."""
    _sent_last: tuple[int, Sequence[Path]] = (-1, ())
    """The version that was sent last, and its folders."""

    def __init__(self, config: SentConfig) -> None:
        super().__init__(config)
        self._hook: PostWriteHook | None = None

    def setup(self, setup: SenderSetup) -> None:
        super().setup(setup)
        if setup.rank == 0:
            if self._config.post_write_hook is not None:
                self._hook = build_hooks(POST_WRITE_HOOKS, self._config.post_write_hook, where="sync.post_write_hook")
            # External servers have another working folder.
            self._root = setup.run_dir.absolute() / "weights"
            # Files of an earlier attempt have other weights.
            folder.clear_all_but(self._root, [])

    def after_write(self, written: Path, engines: Sequence[EngineEndpoint]) -> None:
        """Call it before `engines` load the folder `written`."""
        if self._hook is not None:
            with foreign(self._hook, "call"):
                self._hook(written, engines)

    def clear_old(self, version: int, written: Sequence[Path]) -> None:
        """Removes what no server reads any more; call it when `version` was sent from the folders `written`. A server responds
        when its first pipeline stage has read the files. So when a version is sent again, because an engine was lost, other
        stages may still read the folders of the time before."""
        assert self._root is not None
        last, before = self._sent_last
        folder.clear_all_but(self._root, [*written, *(before if last == version else ())])
        if written:
            self._sent_last = (version, written)

    def close(self) -> None:
        super().close()
        if self._root is not None:
            folder.clear(self._root)
            self._root = None
