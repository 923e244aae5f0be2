"""slime serve keys: who may use a server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from slime_tinker.run_command import DEFAULT_KEYS

app = typer.Typer(help="Keys of slime serve, stored as hashes.")
File = Annotated[Path, typer.Option("--keys", help="File of keys.")]


@app.command()
def add(tenant: Annotated[str, typer.Argument(help="Whose key it is.")], keys: File = DEFAULT_KEYS) -> None:
    """Make a key and print it. It is shown this once."""
    from slime_tinker.keys import Keys

    found, text = Keys.read(keys).added(tenant)
    found.write(keys)
    print(text)


@app.command("list")
def list_(keys: File = DEFAULT_KEYS) -> None:
    """Print tenants and when their keys were made."""
    from slime_tinker.keys import Keys

    for key in Keys.read(keys).keys:
        print(f"{key.tenant}  {datetime.fromtimestamp(key.created, UTC):%Y-%m-%d %H:%M} UTC  sha256 {key.hash[:12]}")


@app.command()
def revoke(tenant: Annotated[str, typer.Argument(help="Whose keys.")], keys: File = DEFAULT_KEYS) -> None:
    """Remove all keys of a tenant; a running server refuses them from then on."""
    from slime_tinker.keys import Keys

    Keys.read(keys).without(tenant).write(keys)
