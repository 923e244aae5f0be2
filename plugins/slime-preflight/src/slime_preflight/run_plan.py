"""Plan: a bound run as devices, phases and a step; and which options of it would lower the peak, by asking again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_core.config.bound import BoundRun
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import FlagTable, kernel_flags
from slime_core.config.trained_roles import with_roles
from slime_core.data.model_folder import read_model_config
from slime_preflight.phases import DeviceGroup, Sharing, device_group
from slime_preflight.step import Step, step_of
from slime_preflight.tenants import Target, planned_roles, policy_engines, push_memory, served_engines

FEWEST_TOKENS = 1024
"""Tokens of a micro-batch; smaller ones are not proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Flags that this run could be given, and the peak that it would have with them."""

    flags: str
    group: str
    """Name of the device group."""
    num_bytes: int
    """Peak with these flags."""
    saved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    target: Target
    step: Step
    groups: tuple[DeviceGroup, ...]

    def fits(self, group: DeviceGroup) -> bool | None:
        """None: not known."""
        peak, device = group.peak, self.target.device_bytes
        if device is None or peak is None:
            return None
        if needed(self, group) > device:
            return False
        return None if group.not_estimated else True


def needed(plan: Plan, group: DeviceGroup) -> int:
    """Bytes of a device that are compared with what it has: on a CPU those of all processes of a machine."""
    if plan.target.device == "cuda":
        return 0 if group.peak is None else group.peak.num_bytes
    most = max((phase.num_bytes + phase.host_bytes for phase in group.phases), default=0)
    return most * group.devices_per_machine


def plan_of(run: BoundRun, target: Target) -> Plan:
    step = step_of(run)
    return Plan(target=target, step=step, groups=tuple(device_groups(run, target, step)))


def device_groups(run: BoundRun, target: Target, step: Step) -> Iterator[DeviceGroup]:
    """The policy's devices, those of roles apart, and those of engines apart."""
    launcher = run.config.launcher
    roles, engines, push = planned_roles(run, target, step), policy_engines(run, target), push_memory(run, target)
    # In one process everything is on the first device; only with colocation are parts offloaded alternately.
    together = engines is not None and bool(roles) and (launcher.colocate or run.launcher.driver.single_process)
    for number, group in enumerate(roles):
        with_engines = launcher.colocate and not number
        offload = launcher.offload_train
        if offload is None:
            offload = target.device == "cuda" and (len(group) > 1 or with_engines)
        sharing = Sharing(
            roles=group,
            engines=engines if together and not number else None,
            # On a CPU there is no other place to sleep in.
            offload_train=offload and target.device == "cuda",
            offload_rollout=launcher.offloads_rollout(target.device) and target.device == "cuda",
            pushes=not number and engines is not None,
            push=push,
        )
        yield device_group(
            listed([*(role.name for role in group), *([] if sharing.engines is None else ["engines"])]),
            sharing,
            num_devices=group[0].num_ranks,
            devices_per_machine=group[0].ranks_per_machine,
        )
    apart = [] if engines is None or together else [engines]
    for row in [*apart, *served_engines(run, target)]:
        of_policy = bool(apart) and row is engines
        yield device_group(
            f"{row.name} engines",
            Sharing(
                roles=(), engines=row, offload_train=False, offload_rollout=False, pushes=False,
                push=push if of_policy and roles else None,
            ),
            num_devices=row.num_engines * row.devices_each,
            devices_per_machine=launcher.num_gpus_per_node,
        )  # fmt: skip


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def savings(run: BoundRun, plan: Plan) -> list[Saving]:
    """Savings in device groups with trained roles, largest first. Each is tried alone, not together with others."""
    found = []
    for flags, changed in alternatives(run, plan):
        try_again = plan_of(changed, plan.target)
        now = {group.name: needed(try_again, group) for group in try_again.groups}
        for group in plan.groups:
            before = needed(plan, group)
            if group.roles and (after := now.get(group.name, before)) < before:
                found.append(Saving(flags=flags, group=group.name, num_bytes=after, saved=before - after))
    return sorted(found, key=lambda saving: -saving.saved)


def alternatives(run: BoundRun, plan: Plan) -> Iterator[tuple[str, BoundRun]]:
    """Runs that differ from this one by options that exist and pass their owner's checks, with the flags that set them."""
    named = FlagTable.of([*kernel_flags(), *chosen_flags(run.config.model_dump(), run.registry)])
    model_config = read_model_config(run.roles[0].model_path)
    # The policy's backend; a role with a backend of its own keeps its options.
    policy = next((role for group in plan.groups for role in group.roles), None)
    for change in () if policy is None else policy.savers:
        config = run.backend.config
        if all(getattr(config, name, None) == value for name, value in change.items()):
            continue
        changed = config.model_copy(update=dict(change))
        driver = run.backend.driver
        if driver.problems(changed, run.num_ranks, model_config) or (
            run.algo.keys.true_on_policy_mode and driver.true_on_policy_problems(changed)
        ):
            continue
        flags = " ".join(flag_text(named, ("backend", name), value) for name, value in change.items())
        yield flags, with_roles(replace(run, backend=replace(run.backend, config=changed)))
    train, launcher = run.config.train, run.config.launcher
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu >= 2 * FEWEST_TOKENS:
        fewer = train.max_tokens_per_gpu // 2
        changes: Mapping[str, Any] = {"max_tokens_per_gpu": fewer}
        yield flag_text(named, ("train", "max_tokens_per_gpu"), fewer), with_table(run, "train", changes)
    if not run.launcher.driver.single_process:
        key, more = "actor_num_gpus_per_node", 2 * (run.num_ranks // launcher.actor_num_nodes)
        if more > launcher.num_gpus_per_node:
            key, more = "actor_num_nodes", 2 * launcher.actor_num_nodes
        larger = with_table(run, "launcher", {key: more})
        if not run.backend.driver.problems(run.backend.config, larger.num_ranks, model_config):
            yield flag_text(named, ("launcher", key), more), larger


def with_table(run: BoundRun, table: str, changes: Mapping[str, Any]) -> BoundRun:
    changed = getattr(run.config, table).model_copy(update=dict(changes))
    return with_roles(replace(run, config=run.config.model_copy(update={table: changed})))


def flag_text(named: FlagTable, path: Sequence[str], value: object) -> str:
    """The flag as it is typed: with its short name if only one key has that name."""
    short = path[-1].replace("_", "-")
    flag, _ = named.find(short)
    name = short if flag is not None and flag.path == tuple(path) else ".".join(path)
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
