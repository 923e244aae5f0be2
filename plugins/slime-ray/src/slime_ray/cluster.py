"""RayCluster: the Ray that a run uses, either one that exists or a private one on this machine.

What a private one opens, all of it on 127.0.0.1 and for bearers of a token that this process made: a gRPC port each for
the GCS, for the raylet (two), for the runtime-env agent, for the driver and for every worker. Two Unix sockets (raylet,
object store) lie in a folder that only this user can enter. There is no dashboard and no Ray client server, and no usage
report is sent. Over these ports Ray pickles: it is on the written list of what does. A cluster that is joined opens
what its operator chose. Ranks meet at 127.0.0.1 too; on several machines, at the one address of the first rank's that
Ray names (`slime_training.rendezvous`).

Ctrl-C: Ray blocks SIGINT in the processes that it starts, and workers inherit that, so they live until the driver has
saved and stops them. If the driver is killed, they go with it; Ray's two
agents follow a minute later, and the folder of logs stays.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from slime_core.errors import ConfigError, SlimeError

LOOPBACK: Final = "127.0.0.1"
LOGICAL_CPUS: Final = 10_000
"""CPUs that a private cluster declares: on one machine no worker should be refused for lack of a core."""
OBJECT_STORE_BYTES: Final = 4 * 2**30
"""At most, and never more than 0.3 of the memory: some weight buckets and a batch. It is taken as it is filled."""
PROBE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """A connection of this process. `leave` ends it, and the cluster too if `join` or `start` made them here."""

    connected_here: bool
    folder: Path | None
    """Sessions, logs and sockets of a private cluster."""

    @classmethod
    def enter(cls, address: str | None) -> RayCluster:
        """Joins the cluster at `address`, or starts a private one. A process that is connected already stays where it
        is. To be called from a thread that lives on: the cluster dies with the thread that started it.

        ConfigError if there is no usable cluster at `address`.
        """
        if ray.is_initialized():
            return cls(connected_here=False, folder=None)
        return cls.start() if address is None else cls.join(address)

    @classmethod
    def join(cls, address: str) -> RayCluster:
        where = f'launcher.address = "{address}"'
        if "://" in address:
            raise ConfigError(
                f"{where}: the run has to be a node of the cluster itself, not a Ray client. Start it on one of its "
                'machines, with host:port of the head or "auto".'
            )
        if address != "auto":
            probe(address, where)
        try:
            with signals_kept():
                ray.init(address=address, **QUIET, namespace=new_namespace())
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                f"{where}: {error}. If the cluster asks for a token, put its own into RAY_AUTH_TOKEN and set "
                "RAY_AUTH_MODE=token."
            ) from error
        return cls(connected_here=True, folder=None)

    @classmethod
    def start(cls) -> RayCluster:
        # mkdtemp's 0700 is what keeps others away from the sockets: Ray opens its own folder to everyone. Under /tmp,
        # because the path of a Unix socket has to be short.
        folder = Path(tempfile.mkdtemp(prefix="slime-", dir="/tmp"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with signals_kept(), loopback_only(), environment({**PRIVATE_ENVIRONMENT, "RAY_AUTH_TOKEN": process_token()}):
            ray.init(
                address="local",
                num_cpus=LOGICAL_CPUS,
                object_store_memory=min(OBJECT_STORE_BYTES, int(0.3 * memory)),
                include_dashboard=False,
                namespace=new_namespace(),
                _temp_dir=str(folder / "ray"),
                # A worker that is started before it is asked for would not have its environment.
                _system_config={"prestart_worker_first_driver": False, "enable_metrics_collection": False},
                **QUIET,
            )
        cluster = cls(connected_here=True, folder=folder)
        if ray.util.get_node_ip_address() != LOOPBACK:
            cluster.leave()
            raise SlimeError(
                f"launcher: Ray {ray.__version__} does not keep a private cluster on {LOOPBACK}. Install a version of "
                "Ray that slime-rl[ray] names, or start a cluster yourself and give --launcher.address."
            )
        return cluster

    @property
    def is_private(self) -> bool:
        return self.folder is not None

    def worker_environment(self, num_workers: int) -> Mapping[str, str]:
        """Variables for the libraries in each of this many workers. On a cluster that was joined Ray sets threads by
        the CPUs that it reserves."""
        if not self.is_private:
            return {}
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // max(1, num_workers)))
        loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
        return {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": loopback}

    def leave(self, *, keep_logs: bool = False) -> None:
        """Safe to call twice."""
        if self.connected_here and ray.is_initialized():
            with signals_kept():
                ray.shutdown()
        if self.folder is not None and not keep_logs:
            # Processes that are just dying may still write a last line to it.
            shutil.rmtree(self.folder, ignore_errors=True)


QUIET: Final[Mapping[str, Any]] = {"log_to_driver": False, "logging_level": logging.ERROR}

PRIVATE_ENVIRONMENT: Final[Mapping[str, str | None]] = {
    # Unset: Ray then takes its own default, which asks for the token.
    "RAY_AUTH_MODE": None,
    "RAY_AUTH_TOKEN_PATH": None,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its coming default; without it every start prints a notice.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@functools.cache
def process_token() -> str:
    """Ray keeps the first token that a process shows, so one process has one for all its private clusters."""
    return secrets.token_hex(32)


def new_namespace() -> str:
    return f"slime-{uuid.uuid4().hex}"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def probe(address: str, where: str) -> None:
    """Ray ends the process when nothing responds at an address, so one asks before."""
    host, _, port = address.rpartition(":")
    if host in ("localhost", LOOPBACK):
        # What Ray makes of it.
        host = ray.util.get_node_ip_address()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: no Ray cluster responds there ({error}). `ray status` on its head shows host:port; leave "
            "launcher.address out for a private cluster on this machine."
        ) from error


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for the processes that are started inside; None removes one. Everything is put back."""
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def loopback_only() -> Iterator[None]:
    """Ray replaces a loopback address by the machine's, and then listens everywhere, unless this switch is off. It is
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, which Ray reads at its first import in the process."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray sets a SIGTERM handler of its own; what to do at SIGTERM is the command line's decision. The processes that Ray
    starts inherit that SIGHUP is ignored: a closed terminal must not end them before the driver has saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    at_hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, at_hangup)


def fits(num_bundles: int, bundle: dict[str, float]) -> bool:
    """Whether the cluster has as much at all."""
    has = ray.cluster_resources()
    return all(has.get(name, 0.0) >= num_bundles * amount for name, amount in bundle.items())


def written(resources: dict[str, float]) -> str:
    """CPUs and GPUs, for a message."""
    return "{" + ", ".join(f"{name}: {resources.get(name, 0):g}" for name in ("CPU", "GPU")) + "}"
