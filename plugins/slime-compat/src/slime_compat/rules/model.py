"""Rules for `model`, the run's folder, and what is saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from slime_compat.translation import Translation

CONVERTED: Final = re.compile(r"[_-](torch[_-]dist|mcore|megatron|dist|torch)$", re.IGNORECASE)
"""How names of folders in Megatron's format end; what is before it is the name of the model."""
QUANTIZED: Final = re.compile(r"[_-](fp8|int4|int8|awq|gptq|w4a16)$", re.IGNORECASE)
"""How names of quantized models end."""


def model(translation: Translation) -> None:
    hf = translation.take("hf-checkpoint")
    save = translation.take("save") or translation.take("output-dir")
    translation.put("name", Path(save or "translated").name)
    if save is not None and str(Path(save).parent) != ".":
        translation.put("runs_dir", str(Path(save).parent))
    start(translation, hf, save)
    teacher = translation.take("opd-teacher-load")
    if teacher is not None and not of_iteration(translation, "opd-teacher-load", teacher):
        put_converted(translation, "opd-teacher-load", teacher)
    if translation.take("save-hf"):
        translation.put("checkpoint.save_hf", True)
        translation.note(
            "save-hf",
            "written once, at the end of the run, to hf/ in the run folder, not at every save",
        )
    translation.take("enable-mtp-training")
    if "enable-mtp-training" in translation.given:
        translation.put("backend.mtp_num_layers", translation.number("mtp-num-layers", int, 1))


def start(translation: Translation, hf: str | None, save: str | None) -> None:
    """Upstream loads weights from --load, or from --ref-load if there are none; --hf-checkpoint is the engines' folder."""
    load, ref = translation.take("load"), translation.take("ref-load")
    if hf is None:
        named = next((of_model(folder) for folder in (ref, load) if folder is not None), None)
        if named is None:
            translation.note(
                "hf-checkpoint", "missing. Pass the Hugging Face folder of the model to train", trains=True
            )
            return
        hf = named
        translation.note("hf-checkpoint", f"missing; {hf} is used, by the name of --ref-load")
    if load is not None and Path(load) in (Path(save or ""), Path(hf)):
        load = None
    elif load is not None and save is not None and Path(load).name == Path(save).name:
        translation.note(
            "load", f"{load}: an earlier start of the run of --save. Here the run folder is what it resumes from"
        )
        load = None
    source = load or ref or hf
    if is_quantized(hf) and not is_quantized(of_model(source)) and same_model(hf, of_model(source)):
        trained = of_model(source)
        translation.put("model.hf_checkpoint", trained)
        translation.put("model.rollout_load", hf)
        translation.note(
            "hf-checkpoint", f"{hf} is what the engines load; {trained}, of which {source} is made, is what is trained"
        )
    else:
        translation.put("model.hf_checkpoint", hf)
        trained = hf
    if ref is not None and of_iteration(translation, "ref-load", ref):
        if load is None:
            translation.note(
                "ref-ckpt-step",
                f"upstream starts the policy from this step too, and the run starts from {trained}. Convert the step with "
                "`slime convert --to hf`, and pass the result as --hf-checkpoint",
                trains=True,
            )
        ref = None
    for flag, folder in (("load", load), ("ref-load", ref)):
        if folder is None or Path(folder) in (Path(trained), Path(hf)):
            continue
        if same_model(trained, of_model(folder)) and CONVERTED.search(Path(folder).name):
            translation.note(
                flag, f"{folder}: the converted form of {trained}, whose weights are loaded; no conversion is needed"
            )
        elif flag == "load":
            translation.note(
                flag,
                f"{folder}: weights are loaded from {trained}. If {folder} has others, convert it with `slime convert` and "
                "pass --hf-checkpoint",
                trains=True,
            )
        else:
            put_converted(translation, "ref-load", folder)


def of_iteration(translation: Translation, flag: str, folder: str) -> bool:
    """Sets the key of the same name to one iteration of a folder in Megatron's format; False if the line names none."""
    step_flag = flag.replace("load", "ckpt-step")
    iteration = translation.number(step_flag, int, None)
    if iteration is None:
        return False
    if translation.backend != "megatron":
        translation.note(
            step_flag,
            f"backend {translation.backend} reads Hugging Face folders: convert that step with `slime convert --to hf`, and "
            f"pass the result as --{flag}",
            trains=True,
        )
        return False
    translation.put(f"model.{flag.replace('-', '_')}", str(Path(folder) / f"iter_{iteration:07d}"))
    return True


def put_converted(translation: Translation, flag: str, folder: str) -> None:
    """Sets the key of the same name. Of a folder in Megatron's format, the model of which it is made is used."""
    used = of_model(folder)
    translation.put(f"model.{flag.replace('-', '_')}", used)
    if used != folder:
        translation.note(flag, f"{folder}: a folder in Megatron's format; {used}, of which it is made, is used")


def of_model(folder: str) -> str:
    """The folder of the model, by the name of a folder of its converted form."""
    return str(Path(folder).with_name(CONVERTED.sub("", Path(folder).name)))


def is_quantized(folder: str) -> bool:
    return QUANTIZED.search(Path(folder).name) is not None


def same_model(one: str, other: str) -> bool:
    """Whether the names of these folders are those of one model, quantized or not."""
    names = {QUANTIZED.sub("", Path(folder).name).lower().replace("_", "-") for folder in (one, other)}
    return len(names) == 1
