"""Rules for `model` and `data`: what GRPOTrainer gets, as far as it is in the script."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from slime_compat.trl.script import NoLiteral, called
from slime_compat.trl.translation import TrlTranslation

FORMATS: Final = ("json", "parquet")
SUFFIXES: Final = (".jsonl", ".json", ".parquet")


def model(translation: TrlTranslation) -> None:
    given = translation.script.trainer.get("model")
    name = translation.given.get("model_name_or_path")
    translation.read.add("model_name_or_path")
    if name is None and given is not None:
        name = named(translation, given)
    if name is None:
        where = f"line {given.lineno}: {ast.unparse(given)}" if given is not None else "not found"
        translation.note("model", f"{where}; set model.hf_checkpoint to the model's folder", trains=True)
        name = "MODEL"
    elif not Path(name).is_dir():
        translation.note("model", f"{name}: must be a folder here: hf download {name} --local-dir {name}")
    translation.put("model.hf_checkpoint", name)
    if translation.switch("trust_remote_code"):
        translation.put("model.trust_remote_code", True)


def named(translation: TrlTranslation, value: ast.expr) -> str | None:
    """The name that a model or a data set is loaded under: a string, or the first argument of `from_pretrained`."""
    value = translation.script.expression(value)
    if isinstance(value, ast.Call) and value.args and called(value) == "from_pretrained":
        value = value.args[0]
    try:
        found = translation.script.literal(value)
    except NoLiteral:
        return None
    return found if isinstance(found, str) else None


def data(translation: TrlTranslation) -> None:
    translation.put("data.prompt_data", dataset(translation, "train_dataset", "TRAIN.jsonl"))
    translation.put("data.input_key", "prompt")
    # Reward functions of TRL get all columns.
    translation.put("data.metadata_key", "*")
    translation.put("data.apply_chat_template", conversational(translation))
    translation.put("data.rollout_shuffle", translation.switch("shuffle_dataset"))
    further = translation.value("chat_template_kwargs")
    if further:
        translation.put("data.apply_chat_template_kwargs", further)
    if translation.value("max_prompt_length") is not None:
        longest = translation.number("max_prompt_length", int)
        translation.put("rollout.rollout_max_prompt_len", longest)
        translation.note(
            "max_prompt_length",
            f"{longest}: longer prompts are left out here, not cut; none are if all fit",
            trains=True,
        )
    translation.put("rollout.rollout_max_response_len", translation.number("max_completion_length", int))


def dataset(translation: TrlTranslation, keyword: str, instead: str) -> str:
    """The file of a data set, with a note if it has to be written first."""
    given = translation.script.trainer.get(keyword)
    name = translation.given.get("dataset_name") if keyword == "train_dataset" else None
    translation.read.add("dataset_name")
    if name is None and given is None:
        translation.note(keyword, "not found; set data.prompt_data", trains=True)
        return instead
    value = given if given is None else translation.script.expression(given)
    loaded, changed = of_load(translation, value) if value is not None else (None, "")
    if name is not None:
        return hub_file(translation, keyword, str(name), "")
    assert given is not None
    if loaded is None or changed:
        translation.note(
            keyword,
            f"line {given.lineno}: {ast.unparse(given)}: made by code{changed}; write it to a file with to_json and set it",
            trains=True,
        )
        return loaded or instead
    if loaded.endswith(SUFFIXES):
        return loaded
    return hub_file(translation, keyword, loaded, split_of(value))


def of_load(translation: TrlTranslation, value: ast.expr) -> tuple[str | None, str]:
    """What load_dataset reads, and which method changes it."""
    changed = ""
    while isinstance(value, ast.Call | ast.Subscript | ast.Attribute):
        if isinstance(value, ast.Call) and called(value) == "load_dataset":
            return first_file(translation, value), changed
        if isinstance(value, ast.Call) and called(value) in ("map", "filter", "select", "shuffle"):
            changed = changed or f", by {called(value)} in line {value.lineno}"
        value = translation.script.expression(value.func if isinstance(value, ast.Call) else value.value)
    return None, changed


def first_file(translation: TrlTranslation, call: ast.Call) -> str | None:
    files = next((keyword.value for keyword in call.keywords if keyword.arg == "data_files"), None)
    try:
        name = translation.script.literal(call.args[0]) if call.args else None
        if name not in FORMATS or files is None:
            return name if isinstance(name, str) else None
        listed = translation.script.literal(files)
    except NoLiteral:
        return None
    first = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    return first if isinstance(first, str) else None


def split_of(value: ast.expr | None) -> str:
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.keyword) and node.arg == "split" and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return ""


def hub_file(translation: TrlTranslation, keyword: str, name: str, split: str) -> str:
    file = f"{name.rpartition('/')[2]}.jsonl"
    code = f"load_dataset({name!r}, split={split or 'train'!r}).to_json({file!r})"
    translation.note(keyword, f'{name}: must be a file here: python -c "from datasets import load_dataset; {code}"')
    return file


def conversational(translation: TrlTranslation) -> bool:
    """Whether prompts are lists of messages, from the first row; if there is none, TRL's usual case."""
    path = Path(translation.get("data.prompt_data"))
    row = first_row(path)
    if row is None:
        translation.note(
            "train_dataset",
            "prompts are taken as lists of messages; for plain text set data.apply_chat_template = false",
        )
        return True
    return isinstance(row.get("prompt"), list)


def first_row(path: Path) -> dict[str, Any] | None:
    try:
        if path.suffix == ".parquet":
            rows = next(pq.ParquetFile(path).iter_batches(batch_size=1)).to_pylist()
            return dict(rows[0])
        with path.open(encoding="utf-8") as lines:
            found = json.loads(next(lines))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
    return found if isinstance(found, dict) else None
