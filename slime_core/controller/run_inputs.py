"""RunInputs: tokenizer, model configs and data of a run, loaded and checked before any start. A dry run stops here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_core import groups
from slime_core.config.bound import BoundEvalSet, BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import FROZEN_MODEL_KEYS, BoundRole
from slime_core.config.run import DataConfig
from slime_core.contracts.media import Media, MediaRenderer
from slime_core.contracts.renderer import Renderer, RendererFactory, RenderSettings
from slime_core.contracts.source import DataSource
from slime_core.controller.engine_folder import converter_for
from slime_core.controller.manifest import check_required
from slime_core.data.buffer import check_state
from slime_core.data.model_folder import (
    NO_LIMIT,
    check_weights,
    context_length,
    has_tokenizer,
    load_tokenizer,
    read_model_config,
)
from slime_core.errors import CheckpointError, ConfigError, DataError, ModelError
from slime_core.registry.boundary import foreign, require, with_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EVAL_SOURCE: Final = "files"
"""The source that reads evaluation sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Tokenizer, model configs and data of a run: everything that a dry run checks."""

    tokenizer: PreTrainedTokenizerBase
    model_config: Mapping[str, Any]
    role_configs: Mapping[str, Mapping[str, Any]]
    """config.json of the model that each trained role starts from."""
    source: DataSource | None
    """None: the collector makes its own groups."""
    eval_sources: Mapping[str, DataSource]
    num_rollout: int
    renderers: Mapping[str, Renderer] = field(default_factory=dict)
    """By the table of their data."""
    converter: BoundPlugin | None = None
    """Converts trained weights to the format of the policy's engines; None: they have the same format."""

    def notices(self) -> list[str]:
        """Sentences on rows that were left out so far, or that the tokenizer changes."""
        found = []
        for where, renderer in self.renderers.items():
            with foreign(renderer, "notices"):
                found += [f"{where}: {notice}" for notice in renderer.notices()]
        return found


def load_run_inputs(run: BoundRun) -> RunInputs:
    """Tokenizer, model config and data. Raises ModelError or DataError for what cannot be used."""
    config = run.config
    check_required(config.required_plugins)
    folder = Path(config.model.hf_checkpoint)
    model_config = read_model_config(folder)
    check_weights(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    role_configs = {role.name: load_role_config(role, len(tokenizer)) for role in run.roles}
    check_stop_tokens(run, model_config.get("text_config", model_config).get("vocab_size"))
    for where, other in other_models(run).items():
        check_copy(other, tokenizer, where=where, trust_remote_code=config.model.trust_remote_code)
    converter = converter_for(run) if run.updates_weights else None
    rollout, data = config.rollout, config.data
    max_prompt_len = rollout.rollout_max_prompt_len
    if max_prompt_len is None and rollout.rollout_max_context_len is not None:
        max_prompt_len = rollout.rollout_max_context_len - 1
    media = media_renderer(run, folder, tokenizer)
    limits = {"context_len": longest_sequence(model_config, tokenizer), "max_unknown_share": data.max_unknown_share}
    renderers: dict[str, Renderer] = {}
    source = None
    if run.reads_prompts:
        renderers["data"] = prompt_renderer(run, data, tokenizer, media, max_prompt_len=max_prompt_len, **limits)
        source = build_source(run.source, renderers["data"], run.rollout_seed)
    evals = {}
    for settings in run.evals:
        longest = max_prompt_len if settings.max_prompt_len is None else settings.max_prompt_len
        renderer = prompt_renderer(run, settings, tokenizer, media, max_prompt_len=longest, **limits)
        evals[settings.name] = eval_source(run, settings, renderer)
        renderers[f"eval.datasets.{settings.name}"] = renderer
    return RunInputs(
        tokenizer=tokenizer,
        model_config=model_config,
        role_configs=role_configs,
        source=source,
        eval_sources=evals,
        num_rollout=count_rollouts(run, source),
        renderers=renderers,
        converter=converter,
    )


def check_stop_tokens(run: BoundRun, vocabulary: int | None) -> None:
    """ConfigError for ids that the model does not have: an engine would refuse every request."""
    asked = {"rollout.rollout_stop_token_ids": run.config.rollout.rollout_stop_token_ids}
    asked |= {f"eval set {settings.name}: stop_token_ids": settings.stop_token_ids for settings in run.evals}
    for where, ids in asked.items():
        if outside := [one for one in ids if one < 0 or (vocabulary is not None and one >= vocabulary)]:
            raise ConfigError(
                f"{where}: {outside} are outside the model's vocabulary of {vocabulary or 'unknown size'}."
            )


def other_models(run: BoundRun) -> dict[str, Path]:
    """Hugging Face folders of models beside the trained ones that read the same tokens, by the keys that name them."""
    frozen_models = (
        (name, copy)
        for role in run.roles
        for name, copy in role.frozen_models.items()
        if copy != role.model_path and not role.backend.driver.reads_frozen(copy)
    )
    folders = {FROZEN_MODEL_KEYS[name]: copy for name, copy in frozen_models}
    if run.teacher is not None:
        folders["engines.teacher.load"] = run.teacher.model_path
    if run.config.model.rollout_load is not None:
        folders["model.rollout_load"] = run.engine_folder
    return folders


def media_renderer(run: BoundRun, folder: Path, tokenizer: PreTrainedTokenizerBase) -> MediaRenderer | None:
    """The renderer of all modalities of the run, which share prompts; None: the run has none."""
    if not run.media:
        return None
    built: Media = run.media[0].build()
    name = run.media[0].title
    asked = run.config.data.multimodal_keys
    columns = {part.entry.name: asked[part.name] for part in run.media}
    with foreign(name, "renderer"):
        renderer = built.renderer(folder, tokenizer, columns, trust_remote_code=run.config.model.trust_remote_code)
    return with_name(renderer, name)


def load_role_config(role: BoundRole, vocabulary: int) -> dict[str, Any]:
    """ModelError for a folder that holds no weights, or a model that does not know all of the tokenizer's tokens."""
    # The policy's folder is the run's, which was checked before.
    where = f"roles.{role.name}.load"
    model_config = read_model_config(role.model_path, where=where)
    check_weights(role.model_path, where=where)
    known = model_config.get("text_config", model_config).get("vocab_size", vocabulary)
    if known < vocabulary:
        raise ModelError(
            f"{role.model_path}: the {role.name}'s model has {known} tokens, the run's tokenizer {vocabulary}: it must start "
            "from a model with the same tokenizer."
        )
    return model_config


def check_copy(folder: Path, tokenizer: PreTrainedTokenizerBase, *, where: str, trust_remote_code: bool) -> None:
    """ModelError for a folder that holds no weights, or a model that scores other tokens than the run's."""
    config = read_model_config(folder, where=where)
    check_weights(folder, where=where)
    known, requested = config.get("text_config", config).get("vocab_size", len(tokenizer)), tokenizer.get_vocab()
    if known < len(tokenizer):
        raise ModelError(
            f"{where} = {folder}: that model has {known} tokens, the run's tokenizer {len(tokenizer)}: it must be a model "
            "with the same tokenizer."
        )
    if not has_tokenizer(folder):
        return
    found = load_tokenizer(folder, trust_remote_code=trust_remote_code).get_vocab()
    if differing := sorted(
        token for token in found.keys() | requested.keys() if found.get(token) != requested.get(token)
    ):
        shown = differing[0]
        raise ModelError(
            f"{where} = {folder}: its tokenizer is another one than the run's: {len(differing)} tokens differ, for example "
            f"{shown!r}, which is {found.get(shown, 'unknown')} there and {requested.get(shown, 'unknown')} in "
            f"{tokenizer.name_or_path}. It must be a model with the same tokenizer."
        )


def prompt_renderer(
    run: BoundRun,
    keys: DataConfig | BoundEvalSet,
    tokenizer: PreTrainedTokenizerBase,
    media: MediaRenderer | None,
    **limits: Any,
) -> Renderer:
    """limits: `max_prompt_len`, `context_len` and `max_unknown_share` of the settings."""
    settings = RenderSettings(
        input_key=keys.input_key,
        label_key=keys.label_key,
        metadata_key=keys.metadata_key,
        tool_key=keys.tool_key,
        media_keys=frozenset(run.config.data.multimodal_keys.values()),
        apply_chat_template=keys.apply_chat_template,
        apply_chat_template_kwargs=run.config.data.apply_chat_template_kwargs,
        **limits,
    )
    part = run.renderer
    factory: RendererFactory = part.build()
    with foreign(part.title, "build"):
        renderer = factory(tokenizer, settings, media)
    require(isinstance(renderer, Renderer), part.title, "build", renderer, "a function that returns a Renderer")
    return with_name(renderer, part.title)


def longest_sequence(model_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that the model reads: of its config, else of the tokenizer, which has 1e30 if it has no limit."""
    return context_length(model_config) or max(2, min(NO_LIMIT, tokenizer.model_max_length))


def eval_source(run: BoundRun, settings: BoundEvalSet, renderer: Renderer) -> DataSource:
    """An evaluation set is read by the same kind of source as the training data, in order."""
    where = f"eval.datasets.{settings.name}"
    files = run.registry.resolve(groups.SOURCES, EVAL_SOURCE, where=where)
    try:
        options = {"prompt_data": [settings.path], "streaming": False}
        part = BoundPlugin.of(files, EVAL_SOURCE, options, where=where)
        source = build_source(part, renderer, run.rollout_seed)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not source.num_rows:
        raise DataError(f"{where}: {settings.path} has no usable row.")
    return source


def build_source(part: BoundPlugin, renderer: Renderer, seed: int) -> DataSource:
    """PluginError for a source that raises, or whose position cannot be saved."""
    factory = part.build()
    with foreign(part.title, "build"):
        source: DataSource = with_name(factory(renderer, seed=seed), part.title)
    require(isinstance(source, DataSource), part.title, "build", source, "a function that returns a DataSource")
    check_state(source)
    return source


def count_rollouts(run: BoundRun, source: DataSource | None) -> int:
    train = run.config.train
    if train.num_rollout is not None:
        return train.num_rollout
    rows = None if source is None else source.num_rows
    if rows is None:
        raise ConfigError("train.num_epoch: the number of rows is not known; pass --num-rollout instead.")
    batch = run.config.rollout.rollout_batch_size
    num_rollout = (train.num_epoch or 1) * rows // batch
    if not num_rollout:
        raise ConfigError(
            f"train.num_epoch = {train.num_epoch or 1}: {rows} rows do not fill one step of {batch} prompts. Pass a "
            "smaller --rollout-batch-size, or --num-rollout."
        )
    return num_rollout


class NoSource(DataSource):
    """The data source where a collector makes its own groups: it has no prompts."""

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
