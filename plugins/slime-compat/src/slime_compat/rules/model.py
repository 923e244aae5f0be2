"""Rules for `model`, the run's folder, and what is saved."""

from __future__ import annotations

from pathlib import Path

from slime_compat.translation import Translation


def model(translation: Translation) -> None:
    hf = translation.take("hf-checkpoint")
    if hf is None:
        translation.note("hf-checkpoint", "missing. Pass the Hugging Face folder of the model to train", trains=True)
    else:
        translation.put("model.hf_checkpoint", hf)
    save = translation.take("save") or translation.take("output-dir")
    translation.put("name", Path(save or "translated").name)
    if save is not None and str(Path(save).parent) != ".":
        translation.put("runs_dir", str(Path(save).parent))
    load = translation.take("load")
    if load is not None and Path(load) != Path(save or ""):
        other_folder(translation, "load", load, hf)
    ref = translation.take("ref-load")
    if ref is not None and other_folder(translation, "ref-load", ref, hf):
        translation.put("model.ref_load", ref)
    teacher = translation.take("opd-teacher-load")
    if teacher is not None:
        translation.put("model.opd_teacher_load", teacher)
        translation.note("opd-teacher-load", "make sure that it is a Hugging Face folder", trains=False)
    if translation.take("save-hf"):
        translation.put("checkpoint.save_hf", True)
        translation.note(
            "save-hf",
            "written once, at the end of the run, to hf/ in the run folder, not at every save",
        )
    translation.take("enable-mtp-training")
    if "enable-mtp-training" in translation.given:
        translation.put("backend.mtp_num_layers", translation.number("mtp-num-layers", int, 1))


def other_folder(translation: Translation, flag: str, folder: str, hf: str | None) -> bool:
    """Whether `folder` is a Hugging Face folder other than that of the trained model. Adds a note if it is not used."""
    if hf is not None and Path(folder) == Path(hf):
        return False
    if Path(folder, "config.json").is_file():
        if flag == "load":
            translation.note(
                flag,
                f"{folder}: weights are loaded from --hf-checkpoint; pass --hf-checkpoint {folder}",
                trains=True,
            )
        return True
    same = hf is not None and Path(folder).name.startswith(Path(hf).name)
    made = f"slime convert {folder} {folder.rstrip('/')}-hf --to hf --hf-checkpoint {hf}"
    text = (
        "treated as the converted form of --hf-checkpoint, whose weights are loaded; no conversion is needed"
        if same
        else f"no Hugging Face folder. Type `{made}` and pass the folder that it makes"
    )
    translation.note(flag, f"{folder}: {text}", trains=not same)
    return False
