"""Rule for --eval-config: a YAML file of evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from slime_compat import known_flags
from slime_compat.translation import Translation

FLAG: Final = "eval-config"
SAME_WORDS: Final = """
    path n_samples_per_eval_prompt temperature top_p top_k max_response_len min_new_tokens repetition_penalty stop
    stop_token_ids input_key label_key tool_key metadata_key apply_chat_template metadata_overrides
    """
SAME: Final = frozenset(SAME_WORDS.split())
"""Keys of a set that have the same name here."""
NO_EFFECT: Final = {"no_stop_trim": True, "skip_special_tokens": False}
"""Keys whose value is what happens here."""


def eval_config(translation: Translation) -> None:
    """The file's sets replace those of --eval-prompt-data, as upstream."""
    path = translation.take(FLAG)
    if path is None:
        return
    translation.take("eval-prompt-data")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        translation.note(FLAG, f"{path}: {error}")
        return
    table = content.get("eval", content) if isinstance(content, dict) else None
    sets = table.get("datasets") if isinstance(table, dict) else None
    if isinstance(sets, dict):
        sets = [{"name": name} | (entry or {}) for name, entry in sets.items()]
    if (
        not isinstance(table, dict)
        or not isinstance(sets, list)
        or not sets
        or not all(isinstance(entry, dict) and "name" in entry for entry in sets)
    ):
        translation.note(FLAG, f"{path}: it has no sets with a name under eval.datasets")
        return
    if "${" in Path(path).read_text(encoding="utf-8"):
        translation.note(FLAG, f"{path}: interpolations (${{...}}) are copied as they are: replace them in run.toml")
    defaults = set_of(translation, "defaults", table.get("defaults") or {})
    if defaults:
        translation.put("eval.defaults", defaults)
    for entry in sets:
        name = str(entry["name"])
        keys = {key: value for key, value in entry.items() if key != "name"}
        datasets = translation.tables.setdefault("eval", {}).setdefault("datasets", {})
        datasets[name] = set_of(translation, name, keys)


def set_of(translation: Translation, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    of_function = {"python_path": list(translation.line.python_path), "args": translation.args()}
    for key, value in entry.items():
        if value is None:
            continue
        if key in SAME:
            found[key] = [value] if key == "stop" and isinstance(value, str) else value
        elif key == "rm_type" and value in known_flags.REWARDS:
            found.setdefault("reward", {"name": known_flags.REWARDS[value]})
        elif key == "custom_rm_path":
            found["reward"] = {"name": "compat", "path": value} | of_function
        elif key == "custom_generate_function_path":
            found["generate"] = {"name": "compat", "path": value} | of_function
        elif NO_EFFECT.get(key) != value:
            known = ", ".join(sorted({*SAME, "rm_type", "custom_rm_path", "custom_generate_function_path"}))
            translation.note(FLAG, f"{name}: {key} = {value!r} is left out; known are {known}")
    return found
