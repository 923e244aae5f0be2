"""Flags without a rule: those that slime or a plugin has under the same name, and those that nobody has."""

from __future__ import annotations

from typing import Any

from slime_compat import known_flags
from slime_compat.flag_words import guessed, typed_as
from slime_compat.translation import Translation
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, FlagTable, kernel_flags, takes_many
from slime_core.errors import near_matches


def same_names(translation: Translation) -> None:
    translation.tables["backend"] = {"name": translation.backend} | translation.tables.get("backend", {})
    translation.tables["engine"] = {"name": translation.engine}
    flags = FlagTable.of([*kernel_flags(), *chosen_flags(translation.tables, translation.registry)])
    for name, words in translation.given.items():
        if name not in translation.done:
            one(translation, known_flags.RENAMED_MEGATRON.get(name, name), name, words, flags)


def one(translation: Translation, name: str, typed: str, words: list[str], flags: FlagTable) -> None:
    """The first that knows the flag."""
    defaults = known_flags.HARMLESS_DEFAULTS.get(name, ())
    if words[-1:] and words[-1] in defaults:
        return
    found, negated = flags.find(name)
    if name in known_flags.OTHER_HOOKS:
        translation.missing(name, known_flags.OTHER_HOOKS[name])
    elif name in known_flags.MISSING and (found is None or found.owner == "slime"):
        translation.missing(name, known_flags.MISSING[name])
    elif name in known_flags.SHAPE:
        if name.endswith("-dropout") and translation.number(typed, float, 0.0):
            translation.note(
                name, f"{words[-1]}: there is no dropout here, since log-probs would be random", trains=True
            )
    elif name in known_flags.WITHOUT_EFFECT:
        translation.note(name, known_flags.WITHOUT_EFFECT[name])
    elif name.startswith("router-") and (found is None or name != "router-policy"):
        of_router(translation, name, words)
    elif found is not None and found.field.exclude:
        # A plugin has it to refuse it, with the reason.
        translation.note(
            typed, found.field.description or "no option here", trains=name in known_flags.TRAINING_MEGATRON
        )
    elif found is not None:
        set_key(translation, typed, words, found, negated)
    elif name.startswith("sglang-"):
        of_engine(translation, name, words)
    elif name in known_flags.MEGATRON:
        of_megatron(translation, name, words)
    else:
        # Whatever a rule has looked for is among the done, said or not.
        known = {
            *translation.done,
            *flags.by_name,
            *known_flags.OTHER_HOOKS,
            *known_flags.MISSING,
            *known_flags.WITHOUT_EFFECT,
            *known_flags.MEGATRON,
        }
        close = near_matches(name, known)
        told = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
        if typed not in translation.of_file:
            translation.note(typed, f"unknown flag{told}", trains=True)
        elif not translation.reads_args:
            translation.note(
                typed, "of --custom-config-path: no flag, and no function of this run reads args", trains=True
            )


def set_key(translation: Translation, typed: str, words: list[str], flag: Flag, negated: bool) -> None:
    many = takes_many(flag.field.annotation)
    if flag.is_switch:
        value: Any = not negated and (not words or words[-1].lower() == "true")
    elif not words:
        translation.note(typed, "wants a value", trains=True)
        return
    else:
        try:
            typed_words = [typed_as(flag, word) for word in words]
        except ValueError as error:
            translation.note(typed, f"{error}", trains=True)
            return
        value = typed_words if many else typed_words[-1]
    translation.put(".".join(flag.path), value)


def of_engine(translation: Translation, name: str, words: list[str]) -> None:
    if translation.engine != "sglang":
        translation.note(name, f'an option of SGLang; the engine is "{translation.engine}"')
        return
    translation.put(f"engine.{name.removeprefix('sglang-').replace('-', '_')}", guessed(words))


def of_router(translation: Translation, name: str, words: list[str]) -> None:
    """There it always stood before the servers; here only where a policy is said."""
    if translation.engine != "sglang" or "router-policy" not in translation.given:
        translation.note(
            name,
            "an option of sglang-router, which is not started: policies are router.middlewares; or say engine.router_policy, "
            "and this in engine.router_options",
        )
        return
    translation.put(f"engine.router_options.{name.removeprefix('router-').replace('-', '_')}", guessed(words))


def of_megatron(translation: Translation, name: str, words: list[str]) -> None:
    if translation.backend != "megatron":
        trains = name in known_flags.TRAINING_MEGATRON
        translation.note(name, f'an option of Megatron; the backend is "{translation.backend}"', trains=trains)
        return
    translation.put(f"backend.{name.replace('-', '_')}", guessed(words))
