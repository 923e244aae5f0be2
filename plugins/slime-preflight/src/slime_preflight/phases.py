"""Phases: what is on each device at every moment of a step, by the table of what is offloaded when (`workers.colocation`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime_preflight.tenants import PlannedEngines, PlannedRole
from slime_training.memory_plan import TRAINING, MemoryItem, MemoryPhase, TransportMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A memory item, and the role or engine that holds it."""

    owner: str
    line: MemoryItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    held: tuple[Allocation, ...]
    """On one device."""
    host_bytes: int
    """On the host, for that device: what sleeps there, and what is always there."""

    @property
    def num_bytes(self) -> int:
        return sum(one.line.num_bytes for one in self.held)

    @property
    def largest(self) -> Allocation | None:
        return max(self.held, key=lambda one: one.line.num_bytes, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that hold the same; on a CPU processes."""

    name: str
    num_devices: int
    devices_per_machine: int
    roles: tuple[PlannedRole, ...]
    engines: PlannedEngines | None
    phases: tuple[Phase, ...]
    not_estimated: tuple[str, ...]
    """Reasons why some memory is in no phase."""

    @property
    def peak(self) -> Phase | None:
        """The first of the phases in which most is held."""
        return max(self.phases, key=lambda phase: phase.num_bytes, default=None)

    @property
    def host_bytes(self) -> int:
        """For one device, at most."""
        return max((phase.host_bytes for phase in self.phases), default=0)

    @property
    def machines(self) -> int:
        return -(-self.num_devices // self.devices_per_machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Roles and engines on the same devices, and whether they are offloaded while others work."""

    roles: Sequence[PlannedRole]
    engines: PlannedEngines | None
    offload_train: bool
    offload_rollout: bool
    pushes: bool
    """The policy is here, and its weights go to engines, wherever these are."""
    push: TransportMemory | None

    def phases(self) -> Iterator[Phase]:
        if self.engines is not None:
            held = (*self._engines(MemoryPhase.ROLLOUT), *self._idle(besides=None))
            host = self._resting(besides=None) + self._engines_on_host(MemoryPhase.ROLLOUT)
            yield Phase(name="rollout", held=held, host_bytes=host)
        for role in self.roles:
            host = self._resting(besides=role) + self._engines_on_host(MemoryPhase.ASLEEP)
            for moment in TRAINING:
                held = (
                    *lines_at(role.name, role.lines, moment),
                    *self._idle(besides=role),
                    *self._engines(MemoryPhase.ASLEEP),
                )
                own = sum(at(role.lines, moment, "host"))
                yield Phase(name=f"{role.name}: {moment}", held=held, host_bytes=host + own)
        if self.pushes or (self.engines is not None and self.push is not None):
            yield Phase(name="sync", held=tuple(self._sync()), host_bytes=self._sync_on_host())

    def _sync_on_host(self) -> int:
        total = self._engines_on_host(MemoryPhase.SYNC)
        if self.pushes:
            policy = self.roles[0]
            total += self._resting(besides=policy) + sum(at(policy.lines, MemoryPhase.SYNC, "host"))
            if self.push is not None:
                total += sum(at(self.push.trainer, MemoryPhase.SYNC, "host"))
        return total

    def _resting(self, *, besides: PlannedRole | None) -> int:
        """Bytes on the host: of roles that wait, and the memory reserved for offloaded roles, which is kept."""
        total = sum(sum(at(role.lines, MemoryPhase.IDLE, "host")) for role in self.roles if role is not besides)
        if self.offload_train:
            total += sum(line.num_bytes for role in self.roles for line in role.lines if sleeps(line))
        return total

    def _engines_on_host(self, moment: MemoryPhase) -> int:
        if self.engines is None or self.engines.memory is None:
            return 0
        return sum(at(self.engines.memory.lines, moment if self.offload_rollout else MemoryPhase.ROLLOUT, "host"))

    def _sync(self) -> Iterator[Allocation]:
        push = self.push or TransportMemory()
        if self.pushes:
            policy = self.roles[0]
            yield from lines_at(policy.name, policy.lines, MemoryPhase.SYNC)
            if not self.offload_train:
                yield from self._idle(besides=policy)
                stays = [line for line in policy.lines if MemoryPhase.SYNC not in line.moments]
                yield from lines_at(policy.name, stays, MemoryPhase.IDLE)
            yield from lines_at("transport", push.trainer, MemoryPhase.SYNC)
        yield from self._engines(MemoryPhase.SYNC)
        if self.engines is not None:
            yield from lines_at("transport", push.engine, MemoryPhase.SYNC)

    def _engines(self, moment: MemoryPhase) -> Iterator[Allocation]:
        if self.engines is None or self.engines.memory is None:
            return
        held = moment if self.offload_rollout else MemoryPhase.ROLLOUT
        yield from lines_at(f"{self.engines.name} engine", self.engines.memory.lines, held)

    def _idle(self, *, besides: PlannedRole | None) -> Iterator[Allocation]:
        """Roles that wait."""
        if not self.offload_train:
            for role in self.roles:
                if role is not besides:
                    yield from lines_at(role.name, role.lines, MemoryPhase.IDLE)

    def not_estimated(self) -> tuple[str, ...]:
        found = []
        for role in self.roles:
            none = (f"backend {role.backend} has no memory estimate",)
            reasons = none if role.memory is None else role.memory.not_estimated
            found += [f"{role.name}: {reason}" for reason in reasons]
        if (engines := self.engines) is not None:
            none = (f"engine {engines.engine} has no memory estimate",)
            reasons = none if engines.memory is None else engines.memory.not_estimated
            found += [f"{engines.name} engines: {reason}" for reason in reasons]
        if self.pushes and self.push is None:
            found.append("sync: the transport has no estimate of its buckets")
        return tuple(found)


def sleeps(line: MemoryItem) -> bool:
    return line.place == "device" and MemoryPhase.IDLE in line.moments and line.moves


def at(lines: Sequence[MemoryItem], moment: MemoryPhase, place: str) -> list[int]:
    return [line.num_bytes for line in lines if line.place == place and moment in line.moments]


def lines_at(owner: str, lines: Sequence[MemoryItem], moment: MemoryPhase) -> Iterator[Allocation]:
    """On a device."""
    for line in lines:
        if line.place == "device" and moment in line.moments:
            yield Allocation(owner=owner, line=line)


def device_group(name: str, sharing: Sharing, *, num_devices: int, devices_per_machine: int) -> DeviceGroup:
    return DeviceGroup(
        name=name,
        num_devices=num_devices,
        devices_per_machine=min(devices_per_machine, num_devices),
        roles=tuple(sharing.roles),
        engines=sharing.engines,
        phases=tuple(sharing.phases()),
        not_estimated=sharing.not_estimated(),
    )
