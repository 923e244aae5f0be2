"""What starts the servers of engines: SGLang, vLLM, in the run's interpreter or in one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_core import groups
from slime_core.errors import PluginError
from slime_core.registry import Registry
from slime_preflight.found import Found, State
from slime_serving.interpreter import Installed, Program, StartsProgram, TorchDevices, program_in, torch_in


def engine_programs(registry: Registry, pythons: Sequence[str]) -> Iterator[Found]:
    """`pythons`: interpreters beside the run's own."""
    programs = list(programs_of(registry))
    for engine, program in programs:
        installed = program_in(None, program)
        if isinstance(installed, Installed):
            yield described(engine, program, installed)
        elif not pythons:
            yield Found(
                what=engine, state=State.NOTE, detail=f"{program.name} is not installed here", advice=program.install
            )
    own = torch_in(None) if pythons else ""
    for python in pythons:
        found = [(engine, program, program_in(python, program)) for engine, program in programs]
        there = [(engine, program, one) for engine, program, one in found if isinstance(one, Installed)]
        yield from (described(engine, program, one, python) for engine, program, one in there)
        if there:
            yield devices_of(python, own)
        else:
            reasons = sorted({str(one) for _, _, one in found}) or [
                "no engine is installed that starts a program there"
            ]
            yield Found(
                what=python, state=State.BAD, detail=" ".join(reasons), advice="Install the engine's program there."
            )


def programs_of(registry: Registry) -> Iterator[tuple[str, Program]]:
    """Name and program of the installed engines; those that cannot be imported are reported elsewhere."""
    for entry in registry.entries(groups.ENGINES):
        try:
            driver = registry.resolve(groups.ENGINES, entry.qualified, where="slime doctor").driver
        except PluginError:
            continue
        if isinstance(driver, type) and issubclass(driver, StartsProgram):
            yield entry.name, driver.program


def described(engine: str, program: Program, installed: Installed, python: str | None = None) -> Found:
    tested = installed.version.partition("+")[0] in program.tested
    where = "" if python is None else f", started with --{engine}-python {python}"
    return Found(
        what=engine,
        state=State.GOOD if tested else State.NOTE,
        detail=f"{program.name} {installed.version}{where}",
        advice="" if tested else f"slime was tested with {program.name} {', '.join(program.tested)}.",
    )


def devices_of(python: str, own: TorchDevices | str) -> Found:
    """Whether the torch of the interpreter sees the GPUs that the run's own sees."""
    torch = torch_in(python)
    if isinstance(torch, str):
        return Found(
            what=python, state=State.BAD, detail=torch, advice="Install torch there, as the engine's program needs it."
        )
    sees = f"{len(torch.gpus)} GPUs" if torch.gpus else "no GPU"
    built = "CPUs" if torch.cuda is None else f"CUDA {torch.cuda}"
    missing = isinstance(own, TorchDevices) and len(own.gpus) > len(torch.gpus)
    return Found(
        what=python,
        state=State.BAD if missing else State.GOOD,
        detail=f"torch {torch.version} for {built}, which sees {sees}",
        advice="Install a torch there that is built for this machine's driver: the run's own sees GPUs."
        if missing
        else "",
    )
