"""SandboxConfig: under which terms code runs."""

from __future__ import annotations

import os
from typing import Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig

Wall = Literal["network", "processes", "files", "bubblewrap"]
WALLS: Final[dict[str, str]] = {
    "network": "no sockets (seccomp, on Linux with x86_64 or aarch64)",
    "processes": "no processes and no signals to others (seccomp)",
    "files": "reads Python's own library alone, writes its own folder alone (Landlock, Linux 5.13 or later)",
    "bubblewrap": "namespaces of its own and a read-only file system besides (bwrap, where it is installed and may)",
}


class SandboxConfig(DriverConfig):
    """Limits and walls of the interpreter."""

    wall_s: float = Field(10.0, gt=0)
    """Seconds that code may take."""
    cpu_s: int = Field(5, gt=0)
    """Seconds of processor time that it may use."""
    memory_mb: int = Field(512, ge=64)
    """Address space, the interpreter's own 30 MB included."""
    file_kb: int = Field(4096, gt=0)
    """What its files may take together; they are gone when it ends."""
    max_files: int = Field(1000, gt=0)
    """Files and folders that it may have at the same time. It is looked at some ten times a second."""
    output_kb: int = Field(64, gt=0)
    """Output beyond that ends it."""
    workers: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), gt=0)
    """Executions at the same time; others wait, and their time does not run. By default one for each processor."""
    preload: tuple[str, ...] = (
        "collections",
        "fractions",
        "functools",
        "itertools",
        "math",
        "random",
        "re",
        "statistics",
    )
    """Modules that are imported once, so that code which imports them need not wait."""
    site_packages: bool = False
    """Whether code may import what is installed beside slime, not only Python's own library."""
    require: tuple[Wall, ...] = ("network", "processes", "files")
    """Walls without which nothing is run: an error at the first step. What a machine lacks can be given up here by name."""
