"""Rules for the run's name and folder, for evaluation, checkpoints and trackers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from slime_compat.trl.rules.data import dataset
from slime_compat.trl.translation import TrlTranslation

TRACKERS: Final = ("wandb", "mlflow", "tensorboard")


def run(translation: TrlTranslation) -> None:
    folder = translation.text("output_dir") or "translated"
    translation.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(folder).name).strip("-._") or "translated")
    if str(Path(folder).parent) != ".":
        translation.put("runs_dir", str(Path(folder).parent))
    translation.put("seed", translation.number("seed", int))
    steps, strategy = translation.number("save_steps", int), translation.text("save_strategy")
    if strategy == "steps":
        translation.put("checkpoint.save_interval", translation.rollout_steps("save_steps", steps))
    elif strategy not in ("no", "IntervalStrategy.NO"):
        translation.note("save_strategy", f"{strategy}: set checkpoint.save_interval, in rollout steps")
    if translation.value("save_total_limit") is not None:
        translation.put("checkpoint.keep_checkpoints", translation.number("save_total_limit", int))
    trackers(translation)


def trackers(translation: TrlTranslation) -> None:
    listed, name = translation.value("report_to"), translation.text("run_name")
    chosen: list[Any] = ["jsonl"]
    for tracker in listed if isinstance(listed, list) else [listed]:
        if tracker == "mlflow" and name:
            chosen.append({"name": "mlflow", "run_name": name})
        elif tracker == "wandb":
            chosen.append({"name": "wandb", "wandb_mode": "online"})
        elif tracker in TRACKERS:
            chosen.append(tracker)
        elif tracker not in ("none", None):
            translation.note(
                "report_to", f"{tracker}: there are {', '.join(TRACKERS)} here, or write one (slime.trackers)"
            )
    if len(chosen) > 1:
        translation.put("trackers", chosen)


def evaluation(translation: TrlTranslation) -> None:
    steps, samples = translation.value("eval_steps"), translation.value("num_generations_eval")
    first, strategy = translation.switch("eval_on_start"), translation.text("eval_strategy")
    if strategy == "no" or "eval_dataset" not in translation.script.trainer:
        return
    if strategy == "steps":
        every = translation.number("logging_steps" if steps is None else "eval_steps", int)
        translation.put("eval.eval_interval", translation.rollout_steps("eval_steps", every))
    else:
        translation.note("eval_strategy", f"{strategy}: set eval.eval_interval, in rollout steps")
    translation.put("eval.skip_eval_before_train", not first)
    translation.put("eval.n_samples_per_eval_prompt", samples or translation.number("num_generations", int))
    translation.put("eval.datasets", {"eval": {"path": dataset(translation, "eval_dataset", "EVAL.jsonl")}})
