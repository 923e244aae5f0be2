"""ray: each rank and each engine in an actor of its own, on a cluster that exists or on a private one.

See `slime_ray.cluster` for what a private one opens. All machines of a cluster need the same distributions
installed, which every worker checks when it is made; plugin files travel as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.launcher import LauncherSetup
from slime_core.errors import ConfigError, EngineError, SlimeError, TrainingError
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.workers.engine_worker import EngineWorkerSpec
from slime_core.workers.launcher import Launcher, RankHandle
from slime_core.workers.train_worker import TrainWorkerSpec
from slime_ray.actor_group import ActorGroup, Member, Roster, together
from slime_ray.actors import EngineActor, Location, StartedProcess, TrainActor
from slime_ray.cluster import LOOPBACK, RayCluster, fits, written
from slime_ray.config import RayConfig
from slime_ray.handles import RayEngine, RayRank

CONTROL_CALLS: Final = 64
"""Calls that an engine takes beside its requests, such as an abort while it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A bundle of a placement group, and what is in it."""

    group: Any
    bundle: int
    location: Location


@dataclass(slots=True, kw_only=True)
class EnginePlacement:
    """The arguments of an engine's start, and its current actors."""

    spec: EngineWorkerSpec
    places: Sequence[tuple[Any, int]]
    """Placement group and bundle on each of its machines."""
    options: dict[str, Any]
    devices: Sequence[Sequence[str]]
    """Those that it shares with a trainer, by machine."""
    actor_group: ActorGroup
    members: Sequence[Member] = ()
    """By machine; the first one serves. None once it was ended."""


class RayLauncher(Launcher):
    """See `Launcher`. `start_trainers` comes first where engines share the trainer's devices."""

    def __init__(
        self, config: RayConfig, setup: LauncherSetup, *, grace_s: float = 10.0, placement_timeout_s: float = 60.0
    ) -> None:
        """`grace_s`: seconds that a worker has to end by itself, and other ranks to finish after one has failed.
        `placement_timeout_s`: seconds that a cluster has to find room."""
        self._config = config
        self._setup = setup
        self._grace_s = grace_s
        self._placement_timeout_s = placement_timeout_s
        self._cluster: RayCluster | None = None
        self._groups: list[Any] = []
        self._roster = Roster()
        self._actor_groups: list[ActorGroup] = []
        self._placements: dict[int, EnginePlacement] = {}
        self._lost_engines = False
        self._num_ranks = 0
        self._shared_slots: list[Slot] = []
        self._shared_gpus = 0.0
        self._placing = asyncio.Lock()
        self._trainers_placed = asyncio.Event()
        """Or they cannot be."""
        self._prepared: dict[int, EnginePlacement] = {}
        """Engines that have not started yet, by index."""

    async def start_trainers(self, specs: Sequence[TrainWorkerSpec]) -> Sequence[RankHandle]:
        if not specs:
            return []
        roles = by_role(specs)
        num_ranks = len(roles[0])
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._trainers_placed.set)
            if self._setup.colocate:
                await stack.enter_async_context(self._placing)
            cluster = self._enter()
            # Roles that share devices use them alternately, so they count once.
            self._num_ranks += num_ranks
            gpus = 1.0 if specs[0].setup.device == "cuda" else 0.0
            roles_on_device = len(roles) + (1 if self._setup.colocate else 0)
            names = " and ".join(of_role[0].setup.role for of_role in roles)
            group = await self._reserve(num_ranks, self._config.num_cpus_per_worker * roles_on_device, gpus, names)
            options = {
                "num_cpus": self._config.num_cpus_per_worker,
                "num_gpus": gpus / roles_on_device,
                "runtime_env": self._runtime_env(cluster, self._num_ranks + self._setup.num_engines),
            }
            actor_groups = [self._new_actor_group(shutdown_method="close") for _ in roles]
            placed = [
                [
                    self._place(
                        actor_group,
                        TrainActor,
                        group,
                        bundle,
                        options,
                        f"trainer {of_role[0].setup.role}",
                        TrainingError,
                    )
                    for bundle in range(num_ranks)
                ]
                for actor_group, of_role in zip(actor_groups, roles, strict=True)
            ]
            located = [
                await self._locate(actor_group, members)
                for actor_group, members in zip(actor_groups, placed, strict=True)
            ]
            bundles = by_device(located[0])
            if self._setup.colocate and not self._shared_slots:
                self._shared_slots = [
                    Slot(group=group, bundle=bundle, location=located[0][bundle]) for bundle in bundles
                ]
                self._shared_gpus = gpus / roles_on_device
        return [
            rank
            for actor_group, of_role, members in zip(actor_groups, roles, placed, strict=True)
            for rank in await self._resolve(actor_group, of_role, [members[bundle] for bundle in bundles])
        ]

    async def _resolve(
        self, actor_group: ActorGroup, specs: Sequence[TrainWorkerSpec], by_rank: Sequence[Member]
    ) -> list[RankHandle]:
        """Creates the workers of one role."""
        located = await self._with_places(actor_group, specs, by_rank)
        for member, spec in zip(by_rank, located, strict=True):
            member.name = f"trainer {spec.setup.role}, rank {spec.setup.rank} of {spec.setup.world_size}"
        devices = devices_of_nodes(by_rank)
        await together(
            [
                actor_group.run(member, member.actor.resolve.remote(spec, devices[node_of(member)]))
                for member, spec in zip(by_rank, located, strict=True)
            ]
        )
        actor_group.ready()
        return [RayRank(member, actor_group) for member in by_rank]

    async def prepare_engines(self, specs: Sequence[EngineWorkerSpec]) -> None:
        await self._trainers_placed.wait()
        if not self._shared_slots or any(spec.setup.num_nodes > 1 for spec in specs):
            return
        placements = await self._place_engines(specs)
        self._prepared = {placement.spec.setup.index: placement for placement in placements}
        await together([self._prepare_engine(placement) for placement in placements])

    async def start_engines(self, specs: Sequence[EngineWorkerSpec]) -> tuple[Sequence[EngineHandle], list[EngineInfo]]:
        if not specs:
            return [], []
        prepared = [self._prepared.pop(index) for spec in specs if (index := spec.setup.index) in self._prepared]
        placements = prepared or await self._place_engines(specs)
        infos = await together([self._start_engine(placement) for placement in placements])
        return [RayEngine(placement.members, placement.actor_group) for placement in placements], infos

    async def _place_engines(self, specs: Sequence[EngineWorkerSpec]) -> list[EnginePlacement]:
        """With actors, which are not located yet."""
        async with self._placing if self._setup.colocate else contextlib.nullcontext():
            cluster = self._enter()
            shared = [] if self._placements else list(self._shared_slots)
        num_nodes, per_node = specs[0].setup.num_nodes, specs[0].setup.devices_here
        num_parts = len(specs) * num_nodes
        gpus = float(per_node) if specs[0].setup.device == "cuda" else 0.0
        cpus = self._config.num_cpus_per_worker
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "runtime_env": self._runtime_env(cluster, self._num_ranks + num_parts),
            "max_concurrency": max(spec.setup.max_batch for spec in specs) + CONTROL_CALLS,
        }
        if shared:
            parts = shares_of(shared, num_parts, per_node)
            options["num_gpus"] = self._shared_gpus
            places = [(part[0].group, part[0].bundle) for part in parts]
            devices = [tuple(name for slot in part for name in slot.location.devices) for part in parts]
        else:
            group = await self._reserve(num_parts, cpus, gpus, "engines")
            places = [(group, bundle) for bundle in range(num_parts)]
            devices = [() for _ in places]
        placements = []
        for number, spec in enumerate(specs):
            own = slice(number * num_nodes, (number + 1) * num_nodes)
            actor_group = self._new_actor_group(shutdown_method="stop")
            placement = EnginePlacement(
                spec=spec, places=places[own], devices=devices[own], options=options, actor_group=actor_group
            )
            self._placements[spec.setup.index] = placement
            self._create_actors(placement)
            placements.append(placement)
        return placements

    def _create_actors(self, placement: EnginePlacement) -> None:
        """Creates its actors, which are not located yet."""
        index, beside = placement.spec.setup.index, len(placement.places) > 1
        placement.members = [
            self._place(
                placement.actor_group,
                EngineActor,
                group,
                bundle,
                placement.options,
                f"engine {index}, machine {number}" if beside else f"engine {index}",
                EngineError,
            )
            for number, (group, bundle) in enumerate(placement.places)
        ]

    async def end_engine(self, index: int) -> None:
        placement = self._placements[index]
        self._lost_engines = True
        try:
            # The servers of one that starts are found only as long as its actor lives.
            await together([member.require_end() for member in placement.members if member.servers is None])
        finally:
            await placement.actor_group.end(failed=True)
        self._actor_groups = [
            actor_group for actor_group in self._actor_groups if actor_group is not placement.actor_group
        ]
        await together([member.require_end() for member in placement.members])
        placement.members = ()

    async def restart_engine(self, index: int) -> tuple[EngineHandle, EngineInfo]:
        placement = self._placements[index]
        if placement.members:
            await self.end_engine(index)
        placement.actor_group = self._new_actor_group(shutdown_method="stop")
        self._create_actors(placement)
        try:
            async with asyncio.timeout(self._placement_timeout_s):
                await self._locate(placement.actor_group, placement.members)
        except TimeoutError as error:
            raise EngineError(
                f"engine {index}: Ray has not started a process for it within {self._placement_timeout_s:g} s; its place "
                "may be taken, or its machine gone."
            ) from error
        info = await self._start_engine(placement)
        return RayEngine(placement.members, placement.actor_group), info

    def share(self, value: Any) -> Any:
        return ray.put(value)

    async def stop(self) -> None:
        actor_groups, self._actor_groups = self._actor_groups, []
        groups, self._groups = self._groups, []
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        died = self._lost_engines or any(actor_group.has_died for actor_group in actor_groups)
        try:
            results = await asyncio.gather(*(actor_group.end() for actor_group in actor_groups), return_exceptions=True)
        finally:
            for group in groups:
                remove_placement_group(group)
            cluster.leave(keep_logs=died)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _enter(self) -> RayCluster:
        # In this thread, for all that it takes seconds: Ray's processes die with the thread that started them.
        if self._cluster is None:
            self._cluster = RayCluster.enter(self._config.address)
        return self._cluster

    async def _reserve(self, num_bundles: int, cpus: float, gpus: float, purpose: str) -> Any:
        """A placement group; ConfigError if the cluster has no room for it."""
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        group = placement_group([bundle] * num_bundles, strategy="PACK")
        self._groups.append(group)
        # A private cluster does not grow: what it has not got, it will not get.
        may_fit = fits(num_bundles, bundle) or not self._is_private
        if may_fit and await asyncio.to_thread(group.wait, self._placement_timeout_s):
            return group
        raise ConfigError(
            f"launcher: {purpose}: asked Ray for {num_bundles} bundles of {written(bundle)}; the cluster has "
            f"{written(ray.cluster_resources())}, of which {written(ray.available_resources())} free, on "
            f"{len(ray.nodes())} nodes. Ask for fewer (launcher.actor_num_gpus_per_node, launcher.rollout_num_gpus, "
            "launcher.num_cpus_per_worker), or free or add machines."
        )

    @property
    def _is_private(self) -> bool:
        return self._cluster is not None and self._cluster.is_private

    def _runtime_env(self, cluster: RayCluster, num_workers: int) -> dict[str, Any]:
        return {"env_vars": dict(cluster.worker_environment(num_workers))}

    def _new_actor_group(self, *, shutdown_method: str) -> ActorGroup:
        actor_group = ActorGroup(self._roster, grace_s=self._grace_s, shutdown_method=shutdown_method)
        self._actor_groups.append(actor_group)
        return actor_group

    def _place(
        self,
        actor_group: ActorGroup,
        kind: type[TrainActor] | type[EngineActor],
        group: Any,
        bundle: int,
        options: dict[str, Any],
        name: str,
        failure: type[SlimeError],
    ) -> Member:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        actor = ray.remote(kind).options(**options, scheduling_strategy=strategy).remote()
        member = Member(actor=actor, name=name, failure=failure)
        actor_group.add(member)
        return member

    async def _locate(self, actor_group: ActorGroup, members: Sequence[Member]) -> list[Location]:
        locations = await together([actor_group.run(member, member.actor.locate.remote()) for member in members])
        for member, location in zip(members, locations, strict=True):
            member.location = location
        return locations

    async def _with_places(
        self, actor_group: ActorGroup, specs: Sequence[TrainWorkerSpec], by_rank: Sequence[Member]
    ) -> list[TrainWorkerSpec]:
        """Specs with local ranks and, for several ranks, the rendezvous address."""
        nodes = [node_of(member) for member in by_rank]
        rendezvous = ""
        if len(specs) > 1:
            first = by_rank[0]
            assert first.location is not None
            host = LOOPBACK if len(set(nodes)) == 1 else first.location.ip
            rendezvous = f"tcp://{await actor_group.run(first, first.actor.hold_port.remote(host))}"
        return [
            replace(
                spec,
                setup=replace(spec.setup, local_rank=nodes[:rank].count(nodes[rank]), rendezvous=rendezvous),
            )
            for rank, spec in enumerate(specs)
        ]

    async def _prepare_engine(self, placement: EnginePlacement) -> None:
        """Of one machine."""
        (member,), (devices,) = placement.members, placement.devices
        (spec,) = await self._located(placement)
        await placement.actor_group.run(member, member.actor.prepare.remote(spec, devices))
        # Stopped like one that has started, if the trainers fail.
        placement.actor_group.ready()

    async def _start_engine(self, placement: EnginePlacement) -> EngineInfo:
        """Starts the actors of one engine together, since they wait for each other. Returns the info of the first machine's."""
        actor_group = placement.actor_group
        specs = await self._located(placement)
        started: list[tuple[EngineInfo, list[StartedProcess]]] = await together(
            [
                actor_group.run(member, member.actor.resolve.remote(spec, devices))
                for member, spec, devices in zip(placement.members, specs, placement.devices, strict=True)
            ]
        )
        actor_group.ready()
        for member, (_, servers) in zip(placement.members, started, strict=True):
            member.servers = servers
        return started[0][0]

    async def _located(self, placement: EnginePlacement) -> list[EngineWorkerSpec]:
        """The spec of its worker on each machine."""
        actor_group, first = placement.actor_group, placement.members[0]
        locations = await self._locate(actor_group, placement.members)
        hosts = [LOOPBACK if is_one_machine() else location.ip for location in locations]
        rendezvous = None
        if len(placement.members) > 1:
            rendezvous = await actor_group.run(first, first.actor.hold_port.remote(hosts[0]))
        return [
            replace(
                placement.spec, setup=replace(placement.spec.setup, host=host, node_rank=rank, rendezvous=rendezvous)
            )
            for rank, host in enumerate(hosts)
        ]


def by_role(specs: Sequence[TrainWorkerSpec]) -> list[list[TrainWorkerSpec]]:
    """The ranks of each role, in the order given."""
    return [list(of_role) for _, of_role in itertools.groupby(specs, key=lambda spec: spec.setup.role)]


def node_of(member: Member) -> str:
    assert member.location is not None
    return member.location.node


def is_one_machine() -> bool:
    """All nodes of the cluster are on one machine, so loopback addresses work."""
    return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1


def by_device(locations: Sequence[Location]) -> list[int]:
    """Bundles in the order of ranks: by node, then by device."""
    return sorted(range(len(locations)), key=lambda bundle: (locations[bundle].order, bundle))


def devices_of_nodes(by_rank: Sequence[Member]) -> dict[str, list[str]]:
    """The devices of all ranks of a node, by local rank."""
    devices: dict[str, list[str]] = {}
    for member in by_rank:
        assert member.location is not None
        devices.setdefault(member.location.node, []).extend(member.location.devices)
    return devices


def shares_of(slots: Sequence[Slot], num_parts: int, size: int) -> list[Sequence[Slot]]:
    """The trainer's slots that each engine shares, or each machine's part of one: neighbours, on one node."""
    if num_parts * size > len(slots):
        raise ConfigError(
            f"launcher.colocate: {num_parts} engines of {size} devices do not fit on the trainer's "
            f"{len(slots)}. Lower launcher.rollout_num_gpus or raise launcher.actor_num_gpus_per_node."
        )
    parts = [slots[start : start + size] for start in range(0, num_parts * size, size)]
    for part in parts:
        if len({slot.location.node for slot in part}) > 1:
            raise ConfigError(
                f"launcher.colocate: {size} neighbouring devices of an engine would be on two machines. Choose "
                "launcher.rollout_num_gpus_per_engine as a divisor of the trainer's ranks per machine, or, for an engine that "
                "spans machines, launcher.num_gpus_per_node."
            )
    return parts
