"""Rules for `data` and for `eval`: prompts from verl's Parquet files, whose rows stay as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ROLLOUT

TEMPLATE: Final = "data.apply_chat_template_kwargs."


def data(translation: PeerTranslation) -> None:
    files = files_of(translation, "data.train_files")
    most = translation.number("data.train_max_samples", int)
    if most > 0:
        files = ranges(translation, "data.train_max_samples", files, most)
    translation.put("data.prompt_data", files if len(files) > 1 else files[0])
    translation.put("data.input_key", translation.text("data.prompt_key"))
    # A reward of verl gets several columns.
    translation.put("data.metadata_key", "*")
    translation.put("data.apply_chat_template", True)
    translation.put("data.rollout_shuffle", translation.switch("data.shuffle"))
    if translation.value("data.seed") is not None:
        translation.put("rollout.rollout_seed", translation.number("data.seed", int))
    further = {
        key.removeprefix(TEMPLATE): translation.value(key) for key in translation.given if key.startswith(TEMPLATE)
    }
    if further:
        translation.put("data.apply_chat_template_kwargs", further)
    images = translation.value("data.image_key")
    if images is not None:
        translation.put("data.multimodal_keys", {"image": images})
    lengths(translation)
    epochs, steps = translation.number("trainer.total_epochs", int), translation.value("trainer.total_training_steps")
    if steps is not None:
        translation.put("train.num_rollout", translation.number("trainer.total_training_steps", int))
    elif (counted := num_steps(translation, files)) is not None:
        translation.put("train.num_rollout", counted)
    else:
        translation.put("train.num_epoch", epochs)
        translation.note(
            "trainer.total_epochs",
            "the files could not be counted here: verl leaves out the rows at the end of an epoch that fill no batch, slime "
            "does not. For exactly its number of steps set train.num_rollout = total_epochs x (rows // train_batch_size)",
        )


def files_of(translation: PeerTranslation, key: str) -> list[str]:
    value = translation.value(key)
    files = value if isinstance(value, list) else [value]
    return [str(file) for file in files]


def ranges(translation: PeerTranslation, key: str, files: list[str], most: int) -> list[str]:
    if len(files) == 1:
        translation.note(key, f"{most}: the first rows of the file; verl draws them at random if it shuffles")
        return [f"{files[0]}@[0:{most}]"]
    translation.note(
        key, f"{most}: several files; set a range on one of them, such as {files[0]}@[0:{most}]", trains=True
    )
    return files


def lengths(translation: PeerTranslation) -> None:
    translation.put("rollout.rollout_max_prompt_len", translation.number("data.max_prompt_length", int))
    translation.put("rollout.rollout_max_response_len", translation.number("data.max_response_length", int))
    filters, cut = translation.switch("data.filter_overlong_prompts"), translation.text("data.truncation")
    if not filters and cut != "error":
        translation.note(
            "data.truncation", f"{cut}: longer prompts are left out here, not cut; none are if all fit", trains=True
        )


def num_steps(translation: PeerTranslation, files: list[str]) -> int | None:
    """Steps of all epochs as verl counts them; None if the files are not here, or not Parquet."""
    try:
        rows = sum(pq.read_metadata(Path(file.partition("@[")[0]).expanduser()).num_rows for file in files)
    except (OSError, ValueError):
        return None
    most = translation.number("data.train_max_samples", int)
    rows = min(rows, most) if most > 0 else rows
    batch, epochs = translation.number("data.train_batch_size", int), translation.number("trainer.total_epochs", int)
    translation.note(
        "trainer.total_epochs",
        f"{epochs}: as {epochs} x {rows // batch} steps of {batch} prompts, from {rows} rows; fewer if prompts are too long",
    )
    return epochs * (rows // batch) or None


def evaluation(translation: PeerTranslation) -> None:
    """verl evaluates before training, and every test_freq steps if that is positive."""
    interval, before = translation.number("trainer.test_freq", int), translation.switch("trainer.val_before_train")
    files = files_of(translation, "data.val_files")
    most = translation.number("data.val_max_samples", int)
    sampling = {
        "n_samples_per_eval_prompt": translation.number(f"{ROLLOUT}.val_kwargs.n", int),
        "eval_temperature": translation.number(f"{ROLLOUT}.val_kwargs.temperature", float),
        "eval_top_p": translation.number(f"{ROLLOUT}.val_kwargs.top_p", float),
        "eval_top_k": translation.number(f"{ROLLOUT}.val_kwargs.top_k", int),
    }
    if translation.switch("trainer.val_only"):
        translation.note("trainer.val_only", "evaluate with slime eval run.toml")
    if interval <= 0 and not before:
        return
    if interval > 0:
        translation.put("eval.eval_interval", interval)
    if not before:
        translation.put("eval.skip_eval_before_train", True)
    for name, value in sampling.items():
        translation.put(f"eval.{name}", value)
    if most > 0:
        files = ranges(translation, "data.val_max_samples", files, most)
    sets: dict[str, Any] = {}
    for file in files:
        sets[set_name(file, sets)] = {"path": file}
    translation.put("eval.datasets", sets)


def set_name(file: str, taken: dict[str, Any]) -> str:
    """gsm8k for gsm8k/test.parquet, aime-2024 for aime-2024.parquet."""
    path = Path(file.partition("@[")[0])
    plain = path.parent.name if path.stem in ("test", "val", "validation") and path.parent.name else path.stem
    name = re.sub(r"[^\w-]+", "-", plain).strip("-") or "validation"
    return name if name not in taken else f"{name}-{len(taken)}"
