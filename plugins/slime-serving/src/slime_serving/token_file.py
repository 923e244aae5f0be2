"""The file of a server's bearer token."""

from __future__ import annotations

import secrets
from pathlib import Path

from slime_core.errors import ConfigError, StorageError


def token_from(file: Path, *, create: bool) -> str:
    """The token in `file`. `create`: write a new token if the file does not exist, readable by its owner only."""
    try:
        if create and not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(32) + "\n")
        token = file.read_text().strip()
    except OSError as error:
        raise StorageError(f"{file}: the token cannot be read or written: {error.strerror}") from None
    if not token:
        raise ConfigError(f"{file}: there is no token in it. Remove the file, and a new one is created.")
    return token
