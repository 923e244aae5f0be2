"""What `slime plan` prints: tables for a person, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime_core.config.bound import BoundRun
from slime_preflight.device_memory import target_of
from slime_preflight.phases import DeviceGroup
from slime_preflight.run_plan import Plan, Saving, needed, plan_of, savings
from slime_preflight.step import Step
from slime_preflight.tenants import PlannedEngines
from slime_training.memory_plan import AWAKE, MemoryItem, MemoryPhase, bytes_at

SMALL_PLAN: Final = 4 * 2**30
"""Below that, sizes are printed in MiB."""
NARROWEST: Final = 110
"""Least width of tables, also where the terminal is narrower or there is none: cut numbers are useless."""
MOST_SAVINGS: Final = 8
STEP_KEYS: Final = {
    "responses_per_prompt": "answers_per_prompt",
    "responses": "answers",
    "max_response_tokens": "max_answer_tokens",
    "responses_per_optimizer_step": "answers_per_optimizer_step",
}
"""Names of the JSON output, which stay."""
TIGHT: Final = 0.9
"""Share of a device; estimates were up to a tenth below what was measured."""
OF_TRAINER: Final = tuple(moment for moment in MemoryPhase if moment in AWAKE)
OF_ENGINE: Final = (MemoryPhase.ROLLOUT, MemoryPhase.SYNC, MemoryPhase.ASLEEP)
ESTIMATE: Final = "~ is an estimate. Weights, gradients, moments and copies are counted parameter by parameter."
NOT_COUNTED: Final = (
    "Not counted: Python, and what CUDA, NCCL and the allocator take for themselves; leave some room. docs/planning.md has "
    "estimates beside measured peaks."
)


def print_plan(run: BoundRun, device_memory: str | None, *, as_json: bool) -> bool:
    """Counts and prints. False if something is known not to fit."""
    plan = plan_of(run, target_of(run.config.launcher.device, device_memory))
    found = savings(run, plan)
    if as_json:
        typer.echo(json.dumps(plan_json(run, plan, found), indent=1))
    else:
        narrow = Console(highlight=False)
        console = Console(highlight=False, width=max(narrow.width, NARROWEST))
        Report(run, plan, found, Unit.of(plan), console).print()
    return not any(plan.fits(group) is False for group in plan.groups)


def plan_json(run: BoundRun, plan: Plan, found: Sequence[Saving]) -> dict[str, Any]:
    return {
        "run": run.config.name,
        "target": asdict(plan.target),
        "step": step_json(plan.step),
        "groups": [group_json(plan, group) for group in plan.groups],
        "savings": [asdict(saving) for saving in found],
    }


def group_json(plan: Plan, group: DeviceGroup) -> dict[str, Any]:
    engines, peak = group.engines, group.peak
    return {
        "name": group.name,
        "num_devices": group.num_devices,
        "machines": group.machines,
        "roles": [
            {
                "name": role.name,
                "backend": role.backend,
                "num_ranks": role.num_ranks,
                "micro_batches": asdict(role.micro_batches),
                "memory": None if role.memory is None else [line_json(line) for line in role.lines],
            }
            for role in group.roles
        ],
        "engines": None
        if engines is None
        else {
            "name": engines.name,
            "engine": engines.engine,
            "num_engines": engines.num_engines,
            "devices_each": engines.devices_each,
            "memory": None if engines.memory is None else [line_json(line) for line in engines.memory.lines],
            "kv_tokens": None if engines.memory is None else engines.memory.kv_tokens,
            "longest_request": engines.longest_request,
            "notes": [] if engines.memory is None else list(engines.memory.notes),
        },
        "phases": {phase.name: phase.num_bytes for phase in group.phases},
        "peak": None if peak is None else peak.name,
        "needed_bytes": needed(plan, group),
        "host_bytes": group.host_bytes,
        "fits": plan.fits(group),
        "not_told": list(group.not_estimated),
    }


def step_json(step: Step) -> dict[str, Any]:
    return {STEP_KEYS.get(name, name): value for name, value in asdict(step).items()}


def line_json(line: MemoryItem) -> dict[str, Any]:
    return asdict(line) | {"moments": [moment.value for moment in MemoryPhase if moment in line.moments]}


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of all sizes of a plan, the same for all, so that they are easy to compare."""

    name: str
    num_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> Unit:
        most = max((needed(plan, group) for group in plan.groups), default=0)
        return cls("GiB", 2**30) if most >= SMALL_PLAN else cls("MiB", 2**20)

    def size(self, num_bytes: int) -> str:
        return f"{num_bytes / self.num_bytes:,.1f}"

    def text(self, num_bytes: int) -> str:
        """With its unit: GiB where MiB would have many digits."""
        return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= SMALL_PLAN else f"{self.size(num_bytes)} {self.name}"


@dataclass(frozen=True, slots=True)
class Report:
    """A plan as a person reads it."""

    run: BoundRun
    plan: Plan
    savings: Sequence[Saving]
    unit: Unit
    console: Console

    def print(self) -> None:
        target, write = self.plan.target, self.console.print
        noun, each = ("GPUs", "each") if target.device == "cuda" else ("CPUs", "a machine")
        has = "unknown memory" if target.device_bytes is None else f"{self.unit.text(target.device_bytes)} {each}"
        write(f"[bold]{escape(self.run.config.name)}[/], planned for {noun} with {has} ({escape(target.found)})\n")
        write(self.processes())
        write()
        for line in self.step():
            write(line)
        for group in self.plan.groups:
            for role in group.roles:
                write(f"\n[bold]{role.name}[/], {self.unit.name} of the rank that holds most, at each moment")
                write("not estimated by its backend" if role.memory is None else self.lines(role.lines, OF_TRAINER))
            if group.engines is not None:
                self.print_engines(group.engines)
        where = "on each device" if target.device == "cuda" else "of each process"
        write(f"\n[bold]Phases[/], {self.unit.name} {where}")
        write(self.phases())
        for group in self.plan.groups:
            write(f"\n{self.verdict(group)}")
            for reason in group.not_estimated:
                write(f"  not estimated: {escape(reason)}")
            for saving in [saving for saving in self.savings if saving.group == group.name][:MOST_SAVINGS]:
                less = f"{self.unit.text(saving.num_bytes)}, {self.unit.size(saving.saved)} less"
                write(f"  {escape(saving.flags)}  -> {less}")
        write(f"\n{ESTIMATE}\n{NOT_COUNTED}", style="dim")

    def processes(self) -> Table:
        table = plain_table("", "plugin", "processes", "devices", "where", right=False)
        for group in self.plan.groups:
            machines = counted(group.machines, "machine")
            for number, role in enumerate(group.roles):
                where = machines if not number else f"the {group.roles[0].name}'s"
                table.add_row(role.name, role.backend, counted(role.num_ranks, "rank"), str(group.num_devices), where)
            if (engines := group.engines) is not None:
                where = machines
                if group.roles:
                    turns = "taking turns" if self.run.config.launcher.colocate else "both at once"
                    where = f"the {group.roles[0].name}'s, {turns}"
                count = counted(engines.num_engines, "engine")
                devices = str(engines.num_engines * engines.devices_each)
                table.add_row(f"{engines.name} engines", engines.engine, count, devices, where)
        return table

    def step(self) -> Iterator[str]:
        step = self.plan.step
        steps = f"{step.num_rollout:,} steps"
        if step.num_rollout is None:
            steps = f"{counted(step.num_epoch or 1, 'pass')} over the data"
        yield (
            f"[bold]A step[/] (of {steps}): {step.prompts:,} prompts x {step.responses_per_prompt} = {step.responses:,} "
            f"responses of at most {step.max_response_tokens:,} tokens"
        )
        if step.max_tokens is None:
            yield "  prompts: no limit is set, so the data decides (--rollout-max-prompt-len)"
        else:
            yield f"  prompts of at most {step.max_prompt_tokens:,} tokens; at most {step.max_tokens:,} tokens in all"
        yield f"  {counted(step.optimizer_steps, 'optimizer step')} of {step.responses_per_optimizer_step:,} responses"
        for role in (role for group in self.plan.groups for role in group.roles):
            micro = role.micro_batches
            over = "" if micro.cp_size == 1 else f", each sequence over {micro.cp_size}"
            unsure = "" if micro.known else "; one longer sequence makes a larger one"
            yield (
                f"  {role.name}: {counted(micro.dp_size, 'data-parallel rank')}{over}; micro-batches of at most "
                f"{micro.tokens:,} tokens a rank{unsure}"
            )

    def print_engines(self, engines: PlannedEngines) -> None:
        write = self.console.print
        write(f"\n[bold]{engines.name} engines[/], {self.unit.name} of one device, at each moment")
        memory = engines.memory
        if memory is None:
            write("not estimated by the engine")
            return
        write(self.lines(memory.lines, OF_ENGINE))
        if memory.kv_tokens is not None:
            requests = memory.kv_tokens // engines.longest_request
            write(
                f"keys and values of {memory.kv_tokens:,} tokens in each engine: {requests:,} requests at once if all have "
                f"{engines.longest_request:,} tokens"
            )
        for note in memory.notes:
            write(escape(note))

    def lines(self, lines: Sequence[MemoryItem], moments: Sequence[MemoryPhase]) -> Table:
        """A row for each component, the sum of its lines."""
        host = any(line.place == "host" for line in lines)
        table = plain_table("", *moments, *(["host"] if host else []))
        for name in dict.fromkeys(line.component for line in lines):
            of_it = [line for line in lines if line.component == name]
            notes = ", ".join(dict.fromkeys(line.note for line in of_it if line.note))
            label = ("~ " if any(line.estimate for line in of_it) else "") + name + (f" ({notes})" if notes else "")
            cells = [self.cell(bytes_at(of_it, moment)) for moment in moments]
            on_host = max(bytes_at(of_it, moment, "host") for moment in MemoryPhase)
            table.add_row(escape(label), *cells, *([self.cell(on_host)] if host else []))
        table.add_section()
        sums = [self.unit.size(bytes_at(lines, moment)) for moment in moments]
        on_host = max(bytes_at(lines, moment, "host") for moment in MemoryPhase)
        table.add_row("sum", *sums, *([self.unit.size(on_host)] if host else []), style="bold")
        return table

    def cell(self, num_bytes: int) -> str:
        return self.unit.size(num_bytes) if num_bytes else ""

    def phases(self) -> Table:
        table = plain_table("devices", "phase", "held", "", "of it", right=False)
        table.columns[2].justify = "right"
        for group in self.plan.groups:
            for number, phase in enumerate(group.phases):
                by_owner: dict[str, int] = {}
                for one in phase.held:
                    by_owner[one.owner] = by_owner.get(one.owner, 0) + one.line.num_bytes
                parts = [f"{owner} {self.unit.size(held)}" for owner, held in by_owner.items()]
                table.add_row(
                    "" if number else group.name,
                    phase.name,
                    self.unit.size(phase.num_bytes),
                    "peak" if phase is group.peak else "",
                    ", ".join(parts) if len(parts) > 1 else "",
                )
        return table

    def verdict(self, group: DeviceGroup) -> str:
        peak, total, has = group.peak, needed(self.plan, group), self.plan.target.device_bytes or 0
        if peak is None or peak.largest is None:
            return f"[bold]{group.name}[/]: nothing is estimated."
        on_gpu, largest = self.plan.target.device == "cuda", peak.largest
        text = (
            f"[bold]{group.name}[/]: {self.unit.text(total)} on {'each device' if on_gpu else 'a machine'} in {peak.name}; the "
            f"largest part is {largest.line.component} ({largest.owner}), {self.unit.text(largest.line.num_bytes)}."
        )
        if on_gpu and group.host_bytes:
            text += f" On the host {self.unit.text(group.host_bytes * group.devices_per_machine)} a machine."
        match self.plan.fits(group):
            case True if total > TIGHT * has:
                rest = f"{self.unit.text(has - total)} are left for what is not counted"
                return f"{text} [yellow]Fits, tightly[/]: {100 * total / has:.0f} % of {self.unit.text(has)}; {rest}."
            case True:
                return f"{text} [green]Fits[/]: {100 * total / has:.0f} % of {self.unit.text(has)}."
            case False:
                return f"{text} [red]Does not fit[/]: {self.unit.text(total - has)} more than {self.unit.text(has)}."
            case _:
                why = "not everything is estimated" if has else "pass --device-memory 80GiB"
                return f"{text} Whether it fits is not known: {why}."


def plain_table(*columns: str, right: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if right and number else "left", no_wrap=bool(right and number))
    return table


def counted(number: int, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {plural}"
