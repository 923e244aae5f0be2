"""Keys: who may use a server. The file has a hash of each key, not the key; each key belongs to a tenant."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from slime_core.atomic_io.atomic_file import write_atomically
from slime_core.errors import ConfigError, StorageError

PREFIX: Final = "tml-"
"""The SDK sends no key that begins otherwise."""
NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    tenant: str
    hash: str
    """sha256 in hex; keys have 256 random bits, so that nothing slower is needed."""
    created: float


@dataclass(frozen=True, slots=True)
class Keys:
    """A tenant may have several keys, so that one can be replaced without a break."""

    keys: tuple[Key, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Keys:
        """None in a file that does not exist."""
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
            return cls(tuple(Key(**row) for row in rows))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StorageError(f"{file}: cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError):
            raise ConfigError(f"{file}: no file of keys. slime serve keys add NAME writes one.") from None

    def write(self, file: Path) -> None:
        """Readable by its owner only."""
        text = json.dumps([asdict(key) for key in self.keys], indent=2)

        def write(aside: Path) -> None:
            aside.touch(mode=0o600)
            aside.write_text(text, encoding="utf-8")

        write_atomically(file, write)

    def added(self, tenant: str) -> tuple[Keys, str]:
        """With another key of this tenant, and that key, which is stored nowhere."""
        if not NAME.fullmatch(tenant):
            raise ConfigError(f'"{tenant}": a tenant is named with lowercase letters, digits and "-", at most 40.')
        text = PREFIX + secrets.token_urlsafe(32)
        key = Key(tenant=tenant, hash=hashed(text), created=time.time())
        return Keys((*self.keys, key)), text

    def without(self, tenant: str) -> Keys:
        """ConfigError for a tenant without keys."""
        left = tuple(key for key in self.keys if key.tenant != tenant)
        if len(left) == len(self.keys):
            raise ConfigError(f'"{tenant}": has no key. There are {", ".join(self.tenants) or "none"}.')
        return Keys(left)

    @property
    def tenants(self) -> list[str]:
        return sorted({key.tenant for key in self.keys})

    def tenant_of(self, text: str) -> str | None:
        """None: it is no key."""
        found = hashed(text)
        return next((key.tenant for key in self.keys if secrets.compare_digest(key.hash, found)), None)


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
