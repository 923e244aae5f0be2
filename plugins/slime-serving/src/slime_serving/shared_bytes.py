"""SharedBytes: bytes that a server on this machine maps."""

from __future__ import annotations

import os


class SharedBytes:
    """Bytes that processes of this user on this machine can map by `path`, until `close`. They have no name in a file system,
    so nothing is left, however this process ends."""

    def __init__(self, data: memoryview) -> None:
        self._descriptor = os.memfd_create("slime-weights")
        try:
            with open(self._descriptor, "wb", closefd=False) as file:
                # An empty file cannot be mapped.
                file.write(data if data.nbytes else b"\0")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)
