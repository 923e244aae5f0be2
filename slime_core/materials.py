"""Materials: what a run works on, loaded and checked before anything is started. A dry run stops here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.buffer.data_path import DataPath
from slime_core.buffer.files import FilesSource
from slime_core.buffer.plugin import FilesConfig
from slime_core.buffer.render import PromptRenderer
from slime_core.config.bound import BoundEvalSet, BoundRun
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, ConfigError, DataError
from slime_core.manifest import check_required
from slime_core.model_folder import check_weights, load_tokenizer, read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What a run works on, checked before anything is started: all that a dry run looks at."""

    tokenizer: PreTrainedTokenizerBase
    model_config: Mapping[str, Any]
    source: DataSource | None
    """None: the collector brings its own groups."""
    eval_sources: Mapping[str, DataSource]
    num_rollout: int


def load_materials(run: BoundRun) -> Materials:
    """Tokenizer, model config and data. Raises ModelError or DataError for what cannot be used."""
    config = run.config
    check_required(config.required_plugins)
    folder = Path(config.model.hf_checkpoint)
    model_config = read_model_config(folder)
    check_weights(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    rollout, data = config.rollout, config.data
    max_prompt_len = rollout.rollout_max_prompt_len
    if max_prompt_len is None and rollout.rollout_max_context_len is not None:
        max_prompt_len = rollout.rollout_max_context_len - 1
    source = None
    if run.collector.driver.needs_engine(run.collector.config):
        renderer = PromptRenderer(
            tokenizer,
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            tool_key=data.tool_key,
            apply_chat_template=data.apply_chat_template,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            max_prompt_len=max_prompt_len,
        )
        source = run.source.build()(renderer, seed=run.rollout_seed)
    evals = {settings.name: eval_source(run, settings, tokenizer) for settings in run.evals}
    return Materials(
        tokenizer=tokenizer,
        model_config=model_config,
        source=source,
        eval_sources=evals,
        num_rollout=count_rollouts(run, source),
    )


def eval_source(run: BoundRun, settings: BoundEvalSet, tokenizer: PreTrainedTokenizerBase) -> DataSource:
    """An evaluation set is read by the same kind of source as the training data, in order."""
    renderer = PromptRenderer(
        tokenizer,
        input_key=settings.input_key,
        label_key=settings.label_key,
        metadata_key=settings.metadata_key,
        tool_key=settings.tool_key,
        apply_chat_template=settings.apply_chat_template,
        apply_chat_template_kwargs=run.config.data.apply_chat_template_kwargs,
        max_prompt_len=settings.max_prompt_len,
    )
    try:
        DataPath.parse(settings.path)
        files = FilesConfig.model_validate({"prompt_data": [settings.path], "streaming": False})
        source = FilesSource(files, renderer, seed=run.rollout_seed)
    except DataError as error:
        raise DataError(f"eval.datasets.{settings.name}: {error}") from error
    if not source.num_rows:
        raise DataError(f"eval.datasets.{settings.name}: {settings.path} has no usable row.")
    return source


def count_rollouts(run: BoundRun, source: DataSource | None) -> int:
    train = run.config.train
    if train.num_rollout is not None:
        return train.num_rollout
    rows = None if source is None else source.num_rows
    if rows is None:
        raise ConfigError("train.num_epoch: the number of rows is not known; say --num-rollout instead.")
    return (train.num_epoch or 1) * rows // run.config.rollout.rollout_batch_size


class NoSource(DataSource):
    """Stands where a collector brings its own groups: there are no prompts."""

    def take(self, num_prompts: int) -> list[Any]:
        return []

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            raise CheckpointError("the checkpoint was taken with a data source, and this run has none")

    @property
    def num_rows(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        return ""
