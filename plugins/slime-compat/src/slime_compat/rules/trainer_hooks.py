"""Rules for hooks by path that are called in the trainer's processes."""

from __future__ import annotations

from typing import Any, Final

from slime_compat.rules.hooks import path_of
from slime_compat.translation import Translation

OF_TRAINER: Final = {
    "custom-megatron-init-path": "megatron_init_path",
    "custom-megatron-before-log-prob-hook-path": "megatron_before_log_prob_hook_path",
    "custom-megatron-before-train-step-hook-path": "megatron_before_train_step_hook_path",
}
"""Flag -> option of the hooks compat."""
POST_WRITE: Final = "custom-update-weight-post-write-path"
ALIGNMENT: Final = "slime.backends.megatron_utils.alignment."
"""Package of upstream's own hooks, which replace layers of Transformer Engine by kernels of SGLang."""


def trainer_hooks(translation: Translation) -> None:
    of_function = {"python_path": list(translation.line.python_path), "args": translation.args(of_trainer=True)}
    of_megatron(translation, of_function)
    path = path_of(translation, POST_WRITE)
    if path is None:
        return
    if translation.tables.get("sync", {}).get("transport") in ("disk", "delta"):
        translation.put("sync.post_write_hook", {"name": "compat", "path": path} | of_function)
    else:
        translation.note(POST_WRITE, "left out, since it has no effect without --update-weight-transport disk upstream")


def of_megatron(translation: Translation, of_function: dict[str, Any]) -> None:
    found = {}
    for flag, option in OF_TRAINER.items():
        path = path_of(translation, flag)
        if path is None:
            continue
        if translation.backend != "megatron":
            translation.note(flag, f'a hook of Megatron; the backend is "{translation.backend}"', trains=True)
        elif path.startswith(ALIGNMENT):
            translation.note(
                flag,
                f"{path}: it replaces layers of Transformer Engine, and the backend builds Megatron's local ones; leave it "
                "out, and read the metric train_rollout_logprob_abs_diff",
                trains=True,
            )
        else:
            found[option] = path
    if found:
        translation.put("backend.hooks", {"name": "compat"} | found | of_function)
