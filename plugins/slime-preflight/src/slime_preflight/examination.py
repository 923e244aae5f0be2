"""Examination: what this machine and its packages lack for a run, and what to type."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from slime_core import __version__, groups
from slime_core.errors import PluginError
from slime_core.registry import Registry, Status
from slime_core.registry.entry import KERNEL, OLD_KERNEL, normalized
from slime_core.registry.installed import requires_old_kernel
from slime_preflight.engine_programs import engine_programs
from slime_preflight.found import Found, State

PYTHONS: Final = ((3, 11), (3, 13))
FEW_FILES: Final = 4096
LITTLE_DISK: Final = 10 * 2**30
LITTLE_SHARED: Final = 2 * 2**30
SHARED: Final = Path("/dev/shm")
SLOW_TO_COMPILE: Final = ("torch", "transformers", "slime_core")


def examine(registry: Registry, engine_pythons: Sequence[str] = ()) -> list[Found]:
    """All results, in the order in which they are printed. `engine_pythons`: interpreters that start engines' servers."""
    checks: tuple[Callable[[Registry], Iterable[Found]], ...] = (
        python, packages, old_kernel, devices, cluster, plugins,
        partial(engine_programs, pythons=engine_pythons), bytecode, machine,
    )  # fmt: skip
    return [found for check in checks for found in check(registry)]


def python(_: Registry) -> Iterator[Found]:
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    fits = PYTHONS[0] <= version <= PYTHONS[1]
    yield Found(
        what="python",
        state=State.GOOD if fits else State.BAD,
        detail=f"{platform.python_version()}, slime-rl {__version__}",
        advice="" if fits else "Install slime for Python 3.11, 3.12 or 3.13.",
    )


def packages(registry: Registry) -> Iterator[Found]:
    """Whether the dependencies of slime-rl and of every distribution with plugins are installed."""
    dists = dict.fromkeys(["slime-rl", *(entry.dist for entry, _ in registry.listing())])
    named = {file.path.name for file in registry.plugin_files}
    lacking = [problem for dist in dists if dist not in named for problem in unmet(dist)]
    if not lacking:
        yield Found(
            what="packages", state=State.GOOD, detail=f"dependencies of {len(dists)} distributions are satisfied"
        )
    for dist, requirement, there in lacking:
        yield Found(
            what="packages",
            state=State.BAD,
            detail=f"{dist} requires {requirement.name}{requirement.specifier}, and there is {there}",
            advice=f"pip install '{requirement.name}{requirement.specifier}'",
        )


def unmet(dist: str) -> Iterator[tuple[str, Requirement, str]]:
    """Requirements of a distribution, without its extras, that are not satisfied, and the installed version."""
    for text in importlib.metadata.requires(dist) or ():
        requirement = Requirement(text)
        if normalized(requirement.name) == OLD_KERNEL:
            # No advice to install it: `old_kernel` reports it.
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield dist, requirement, "none"
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            yield dist, requirement, there


def old_kernel(_: Registry) -> Iterator[Found]:
    """A distribution with the kernel's old name, which belongs to another project now, and those that require it."""
    for dist in importlib.metadata.distributions():
        name, requirements = dist.name, dist.requires or ()
        if normalized(name) == OLD_KERNEL:
            yield Found(
                what=OLD_KERNEL,
                state=State.BAD,
                detail=f"{name} {dist.version} is installed beside {KERNEL}. It is no part of slime, or a kernel of 0.1",
                # They may have written to the same folder.
                advice=f"pip uninstall {OLD_KERNEL} && pip install --force-reinstall --no-deps {KERNEL}",
            )
        elif any(normalized(Requirement(text).name) == OLD_KERNEL for text in requirements):
            refused = requires_old_kernel(requirements)
            yield Found(
                what=OLD_KERNEL,
                state=State.BAD if refused else State.NOTE,
                detail=f"{name} {dist.version} requires {OLD_KERNEL}, as if for slime 0.1; on PyPI that is another project",
                advice=f"pip install --upgrade {name}, to a version that requires {KERNEL}",
            )


def devices(_: Registry) -> Iterator[Found]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            detail = f"{properties.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            yield Found(what=f"cuda:{number}", state=State.GOOD, detail=f"{detail} (torch {torch.__version__})")
    elif torch.version.cuda is not None:
        yield Found(
            what="devices",
            state=State.BAD,
            detail=f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and sees no device",
            advice="Run nvidia-smi: the driver may be older than that, or no GPU is visible. For CPU runs: --device cpu.",
        )
    else:
        yield Found(what="devices", state=State.NOTE, detail=f"CPU only (torch {torch.__version__})")


def cluster(_: Registry) -> Iterator[Found]:
    if importlib.util.find_spec("ray") is None:
        yield Found(
            what="ray",
            state=State.NOTE,
            detail="not installed: --launcher ray is off",
            advice="pip install 'slime-rl[ray]'",
        )
    else:
        yield Found(what="ray", state=State.GOOD, detail=importlib.metadata.version("ray"))


def plugins(registry: Registry) -> Iterator[Found]:
    """Names that do not resolve, and the installed backends, engines and algorithms."""
    for entry, status in registry.listing():
        if status is Status.UNKNOWN_GROUP:
            detail = f"{entry.name} of {entry.provenance} is in group {entry.group}, which slime does not have"
            yield Found(
                what="plugins", state=State.BAD, detail=detail, advice=f"pip uninstall {entry.dist}, or a newer one"
            )
        elif status is Status.DUPLICATE:
            detail = f"{entry.group} {entry.name} is registered by {entry.dist} and others"
            yield Found(
                what="plugins", state=State.NOTE, detail=detail, advice=f"Pass the full name: {entry.dist}/{entry.name}"
            )
    for group in (groups.BACKENDS, groups.ENGINES, groups.ALGORITHMS):
        noun, good = groups.NOUNS[group], []
        for entry in registry.entries(group):
            try:
                registry.resolve(group, entry.qualified, where=f"slime doctor: {noun}")
                good.append(entry.name)
            except PluginError as error:
                yield Found(what=noun, state=State.BAD, detail=str(error), advice=f"pip install --upgrade {entry.dist}")
        if good:
            yield Found(what=noun, state=State.GOOD, detail=", ".join(good))
        else:
            yield Found(
                what=noun, state=State.BAD, detail="none is installed", advice="Install one; the README lists them."
            )


def bytecode(_: Registry) -> Iterator[Found]:
    """Whether a process finds compiled modules. Without them, torch and transformers take ten seconds to import, every time."""
    lacking, closed = [], False
    for name in SLOW_TO_COMPILE:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        compiled = Path(importlib.util.cache_from_source(spec.origin))
        if not compiled.exists():
            lacking.append(name)
            closed |= sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
    if not closed:
        yield Found(what="compiled modules", state=State.GOOD, detail="are kept")
        return
    packages = sysconfig.get_path("purelib")
    reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "their folder cannot be written"
    yield Found(
        what="compiled modules",
        state=State.NOTE,
        detail=f"none of {', '.join(lacking)}, and {reason}: every process of a run compiles them anew, for ten seconds",
        advice=f"unset PYTHONDONTWRITEBYTECODE, or once: {sys.executable} -m compileall -q -j 0 {packages}",
    )


def machine(_: Registry) -> Iterator[Found]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Found(
                what="ports", state=State.GOOD, detail=f"ports of 127.0.0.1 are free, such as {server.getsockname()[1]}"
            )
    except OSError as error:
        detail = f"127.0.0.1 has no free port: {error}"
        yield Found(
            what="ports", state=State.BAD, detail=detail, advice="Engines and routers listen there: look at `ip addr`."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    yield Found(
        what="open files",
        state=State.NOTE if few else State.GOOD,
        detail=f"{soft} (at most {hard})",
        advice=f"ulimit -n {FEW_FILES}" if few else "",
    )
    free = shutil.disk_usage(Path.cwd()).free
    yield Found(
        what="disk",
        state=State.NOTE if free < LITTLE_DISK else State.GOOD,
        detail=f"{free / 2**30:.0f} GiB free here",
        advice="--runs-dir on a larger disk" if free < LITTLE_DISK else "",
    )
    if SHARED.is_dir():
        shared = shutil.disk_usage(SHARED).free
        little = shared < LITTLE_SHARED
        yield Found(
            what="shared memory",
            state=State.NOTE if little else State.GOOD,
            detail=f"{shared / 2**30:.1f} GiB free in {SHARED}",
            advice="In a container: --shm-size 8g, for Ray and NCCL." if little else "",
        )
