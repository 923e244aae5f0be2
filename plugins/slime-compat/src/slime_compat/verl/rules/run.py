"""Rules for the run's name and folder, for checkpoints and trackers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime_compat.peer import PeerTranslation


def run(translation: PeerTranslation) -> None:
    project, experiment = translation.text("trainer.project_name"), translation.text("trainer.experiment_name")
    translation.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", experiment).strip("-._") or "translated")
    folder = translation.value("trainer.default_local_dir")
    if folder is not None and str(Path(str(folder)).parent) != ".":
        translation.put("runs_dir", str(Path(str(folder)).parent))
    interval, kept = translation.number("trainer.save_freq", int), translation.value("trainer.max_actor_ckpt_to_keep")
    if interval > 0:
        translation.put("checkpoint.save_interval", interval)
    if kept is not None:
        translation.put("checkpoint.keep_checkpoints", translation.number("trainer.max_actor_ckpt_to_keep", int))
    mode = translation.text("trainer.resume_mode")
    if mode != "auto":
        translation.note("trainer.resume_mode", f"{mode}: pass --fresh or --resume FOLDER to slime run")
    trackers(translation, project, experiment)


def trackers(translation: PeerTranslation, project: str, experiment: str) -> None:
    listed = translation.value("trainer.logger")
    chosen: list[Any] = ["jsonl"]
    for name in listed if isinstance(listed, list) else [listed]:
        if name == "wandb":
            chosen.append({"name": "wandb", "wandb_mode": "online", "wandb_project": project})
        elif name == "mlflow":
            chosen.append({"name": "mlflow", "experiment": project, "run_name": experiment})
        elif name == "tensorboard":
            chosen.append({"name": "tensorboard"})
        elif name not in ("console", "file", None):
            translation.note(
                "trainer.logger", f"{name}: no such tracker here; see slime plugins, or write one (slime.trackers)"
            )
    if len(chosen) > 1:
        translation.put("trackers", chosen)
