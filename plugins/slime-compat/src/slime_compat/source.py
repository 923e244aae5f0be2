"""OldSource: prompts from an old data source."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import xxhash

from slime_compat.config import CompatSourceConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import resolve
from slime_compat.old_sample import Sample
from slime_core.contracts.source import DataSource, Renderer
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.types.prompt import Prompt

METHODS: Final = ("get_samples", "save", "load")
STATE_ID: Final = 0
"""The rollout id under which the state is saved and loaded; the folder is another one each time."""
MOST_IN_VAIN: Final = 10_000
"""Consecutive prompts that may be too long."""


class OldSource(DataSource):
    """Takes the prompt, the label and the metadata of the first sample of each group. Its state is what the source writes below
    `args.save`. Unused and partial groups go to the run's data buffer, so `add_samples` is never called."""

    def __init__(self, config: CompatSourceConfig, renderer: Renderer, *, seed: int) -> None:
        """PluginError if the class is missing, or lacks a method."""
        self._config = config
        self._renderer = renderer
        self._seed = seed
        self._asked = f'data.path = "{config.path}"'
        self._class = resolve(config.path, config.python_path, where="data.path", is_class=True)
        if missing := [name for name in METHODS if not callable(getattr(self._class, name, None))]:
            raise PluginError(f"{self._asked}: the class has no {', '.join(missing)}.")
        self._old = self._class(self._args({}))
        self._num_drawn = 0
        self._num_too_long = 0

    def _args(self, folders: Mapping[str, str]) -> OldArgs:
        own = {
            "rollout_global_dataset": True,
            "rollout_seed": self._seed,
            "rollout_max_prompt_len": self._renderer.max_prompt_len,
            "save": None,
            "load": None,
        }
        return OldArgs({**own, **self._config.args, **folders}, "data.args", own=True)

    def take(self, num_prompts: int) -> list[Prompt]:
        taken: list[Prompt] = []
        in_vain = 0
        while len(taken) < num_prompts:
            groups = self._old.get_samples(num_prompts - len(taken))
            if not groups:
                break
            for group in groups:
                prompt = self._prompt(group)
                if self._renderer.accepts(prompt):
                    taken.append(prompt)
                    self._num_drawn += 1
                    in_vain = 0
                    continue
                self._num_too_long += 1
                in_vain += 1
                if in_vain == MOST_IN_VAIN:
                    raise DataError(
                        f"{self._asked}: {in_vain} consecutive prompts are too long: {self._renderer.limit}."
                    )
        return taken

    def _prompt(self, group: Any) -> Prompt:
        number = self._num_drawn
        origin = f"{self._config.path}, draw {number}"
        if not isinstance(group, list | tuple) or not group or not hasattr(group[0], "prompt"):
            raise PluginError(f"{self._asked}: get_samples must return a list of groups, each a list of Samples.")
        first: Sample = group[0]
        if any(sample.prompt != first.prompt for sample in group):
            raise PluginError(
                f"{self._asked}: the samples of a group have different prompts; here all samples of a group respond to one "
                "prompt. Return a group for each prompt, and set rollout.n_samples_per_prompt."
            )
        if any(value is not None for value in (first.multimodal_inputs or {}).values()):
            raise PluginError(
                f"{self._asked}: multimodal_inputs are not supported; use data.multimodal_keys with files."
            )
        if len(first.tokens):
            raise PluginError(f"{self._asked}: a sample has tokens already; responses come from a generator.")
        prompt = self._renderer.render({self._config.input_key: first.prompt}, group_index=number, origin=origin)
        return replace(prompt, label=first.label, metadata={**prompt.metadata, **(first.metadata or {})})

    def state(self) -> Mapping[str, Any]:
        with TemporaryDirectory(prefix="slime-compat-") as folder:
            self._old.args = self._args({"save": folder, "load": folder})
            self._old.save(STATE_ID)
            files = {
                str(path.relative_to(folder)): base64.b64encode(path.read_bytes()).decode("ascii")
                for path in sorted(Path(folder).rglob("*"))
                if path.is_file()
            }
        if not files:
            raise PluginError(
                f"{self._asked}: save({STATE_ID}) wrote no file below args.save, so a resumed run could not continue. Write "
                "there, and read args from self.args."
            )
        return {
            "fingerprint": self.fingerprint(),
            "seed": self._seed,
            "num_drawn": self._num_drawn,
            "num_too_long": self._num_too_long,
            "files": files,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if (state.get("fingerprint"), state.get("seed")) != (self.fingerprint(), self._seed):
            raise CheckpointError(
                f"the checkpoint's prompts are not those of {self._asked}: its options or the seed have changed. "
                "Set them back, or start a new run."
            )
        with TemporaryDirectory(prefix="slime-compat-") as folder:
            for name, content in state["files"].items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(content))
            self._old = self._class(self._args({"save": folder, "load": folder}))
            self._old.load(STATE_ID)
        self._num_drawn = state["num_drawn"]
        self._num_too_long = state["num_too_long"]

    @property
    def num_rows(self) -> int | None:
        # Its length may change with what it draws, and too long prompts are not known before.
        return None

    def fingerprint(self) -> str:
        """Hash of the options."""
        options = json.dumps(self._config.model_dump(mode="json"), sort_keys=True, default=str)
        return xxhash.xxh3_128_hexdigest(options.encode())

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"rollout/data/num_too_long": float(self._num_too_long)}
