"""Starts run files with --dry-run, with substitutes for what they name."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import substitute_modules
import substitutes

from slime_compat.run_document import run_file
from slime_compat.translation import Translation

PLUGINS: Final = ("slime_megatron.plugin", "slime_sglang.plugin", "slime_ray.plugin", "slime_sources.plugin")
MODEL_KEYS: Final = frozenset({"hf_checkpoint", "ref_load", "rollout_load", "opd_teacher_load", "load"})


def dry_runs(translations: Mapping[str, Translation], folder: Path, checkout: Path) -> dict[str, str]:
    """Script to the reason for which its run file is rejected; empty if it is accepted."""
    # For all forks.
    for module in ("transformers", "slime_core.controller.startup", "slime_core.controller.run_inputs", *PLUGINS):
        importlib.import_module(module)
    reasons = {}
    for n, (name, translation) in enumerate(translations.items()):
        own = folder / f"dry-{n}"
        own.mkdir()
        reasons[name] = dry_run(translation.tables, own, checkout)
        print(f"  {name}: {reasons[name] or 'accepted'}", flush=True)
    return reasons


def dry_run(tables: dict[str, Any], own: Path, checkout: Path) -> str:
    """Forks: a process that imports transformers takes seconds to start."""
    try:
        prepared = moved(tables, own, checkout)
        write_substitutes(prepared, own)
    except LookupError as error:
        return str(error)
    (own / "run.toml").write_text(run_file(prepared, "a launch line"))
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            status = 70
            try:
                os.chdir(own)
                # Before this repository, which has a package `examples` too.
                sys.path.insert(0, str(checkout))
                substitute_modules.install()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.argv = ["slime", "run", "run.toml", "--dry-run"]
                from slime_core.cli.main import main

                main()
                status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace").replace(str(own), "")
    if not code:
        return ""
    return re.sub(r"\s*\n\s*", " | ", text[text.find("error:") :].strip())


def moved(value: Any, own: Path, checkout: Path, key: str = "") -> Any:
    """The value with absolute paths in it moved below `own`; folders of modules are those of the checkout."""
    if isinstance(value, dict):
        return {name: moved(inner, own, checkout, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [moved(inner, own, checkout, key) for inner in value]
    if not isinstance(value, str):
        return value
    if key == "python_path":
        return str(checkout / value.replace("/root/slime", str(checkout)))
    return f"{own}{value}" if value.startswith("/") else value


def write_substitutes(tables: Mapping[str, Any], own: Path) -> None:
    for folder in models(tables):
        substitutes.model_folder(own / folder)
    data, eval_ = tables.get("data", {}), tables.get("eval", {})
    sft = tables["algo"]["name"] == "sft"
    prompts = data.get("prompt_data", [])
    evals = eval_.get("eval_prompt_data", [])
    named = [prompts] if isinstance(prompts, str) else [*prompts]
    for path in [*named, *(evals[1::2] if isinstance(evals, list) else [])]:
        substitutes.data_file(own / re.sub(r"@\[.*", "", path), data, eval_, sft=sft)
    for one in eval_.get("datasets", {}).values():
        substitutes.data_file(own / re.sub(r"@\[.*", "", one["path"]), data, eval_, sft=False)
    for key in ("wandb_key_file",):
        if key in tables:
            (own / tables[key]).touch()


def models(tables: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from models(value)
        elif key in MODEL_KEYS and isinstance(value, str):
            yield value
