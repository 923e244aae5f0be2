"""Checks of the folder that the policy's engines start from, and the converter from trained weights to its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core import groups
from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.data.model_folder import read_model_config, shapes_in
from slime_core.errors import ConfigError, ModelError


def converter_for(run: BoundRun) -> BoundPlugin | None:
    """The plugin that converts trained weights to the format of the engines' folder; None: they have the same format.
    ConfigError for engines that cannot get new weights, ModelError for a folder of another model."""
    config = read_model_config(run.engine_folder, where=key_of_folder(run))
    quantization: Mapping[str, Any] | None = config.get("quantization_config")
    check_drivers(run, quantization)
    converter = None if quantization is None else converter_of(run, quantization)
    check_tensors(run, converter)
    return converter


def check_drivers(run: BoundRun, quantization: Mapping[str, Any] | None) -> None:
    engine, transport = run.engine, run.transport
    if quantization is not None and not engine.driver.supports_quantized_weights:
        name = "Name" if run.config.model.rollout_load is None else "Leave model.rollout_load out, or name"
        plain = f"{name} a folder whose weights are not quantized."
        raise ConfigError(
            [f'{quantized(run)}, and engine "{engine.name}" takes no such weights from a trainer. {plain}']
        )
    problems = list(engine.driver.push_problems(engine.config, quantization))
    if transport is not None:
        problems += transport.driver.push_problems(transport.config, engine.config, quantization)
    if problems:
        raise ConfigError(problems)


def converter_of(run: BoundRun, quantization: Mapping[str, Any]) -> BoundPlugin:
    """The installed converter that writes weights of this quantization."""
    entries = run.registry.entries(groups.CONVERTERS)
    for entry in entries:
        part = PluginSpec(group=entry.group, name=f"{entry.dist}/{entry.name}", options={}).resolve(run.registry)
        if part.driver.writes(quantization):
            return part
    method = quantization.get("quant_method", "by a method that config.json does not name")
    there = ", ".join(sorted(entry.name for entry in entries)) or "none"
    raise ConfigError(
        [
            f"{quantized(run)} ({method}), and no installed converter ({there}) quantizes so what is trained. Name a folder of "
            f"one (`slime convert {run.config.model.hf_checkpoint} FOLDER --to NAME`), or install the plugin that made it."
        ]
    )


def quantized(run: BoundRun) -> str:
    return f"{key_of_folder(run)} = {run.engine_folder}: its weights are quantized"


def key_of_folder(run: BoundRun) -> str:
    return "model.hf_checkpoint" if run.config.model.rollout_load is None else "model.rollout_load"


def check_tensors(run: BoundRun, converter: BoundPlugin | None) -> None:
    """ModelError unless a weight update replaces all weights that the engines start with: the same tensors, with the names
    and shapes of the trainer's folder."""
    folder, trained = run.engine_folder, Path(run.config.model.hf_checkpoint)
    if folder == trained:
        return
    there, here = shapes_in(folder), shapes_in(trained)
    if not there or not here:
        # Weights in another format than safetensors are checked when they are loaded.
        return
    made = None if converter is None else converter.driver.tensor_format(folder)
    sent = {name: shape for own, shape in here.items() for name in ((own,) if made is None else made.names(own))}
    where = f"{key_of_folder(run)} = {folder}"
    if unknown := sorted(there.keys() - sent.keys()):
        raise ModelError(
            f"{where}: it has {len(unknown)} tensors that {trained} has not, and that a weight update would not replace: "
            f"{', '.join(unknown[:3])}. Give a folder of the same model."
        )
    differing = sorted(name for name, shape in there.items() if name in here and here[name] != shape)
    if differing:
        first = differing[0]
        raise ModelError(
            f"{where}: another model: {first} has shape {list(there[first])}, in {trained} {list(here[first])}; "
            f"{len(differing)} tensors differ. Give a folder of the same model."
        )
