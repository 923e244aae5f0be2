"""The file of a server's bearer token."""

from __future__ import annotations

import secrets
from pathlib import Path

from slime_core.errors import ConfigError, StorageError


def token_from(file: Path, *, create: bool) -> str:
    """The file's token. One that is made can be read by its owner alone."""
    try:
        if create and not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(32) + "\n")
        token = file.read_text().strip()
    except OSError as error:
        raise StorageError(f"{file}: the token cannot be read or written: {error.strerror}") from None
    if not token:
        raise ConfigError(f"{file}: there is no token in it. Remove it to have one made.")
    return token
