"""Flags without a rule: those that slime or a plugin has under the same name, and unknown ones."""

from __future__ import annotations

from typing import Any, Final

from slime_compat import known_flags
from slime_compat.flag_words import guessed, typed_as
from slime_compat.translation import Translation
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, FlagTable, kernel_flags, takes_many
from slime_core.errors import near_matches

ROUTER_PREFIXES: Final = ("router-", "sglang-router-")
ROUTER_TIMEOUT: Final = "sglang-router-request-timeout-secs"
"""Timeout of a request."""


def same_names(translation: Translation) -> None:
    translation.tables["backend"] = {"name": translation.backend} | translation.tables.get("backend", {})
    translation.tables["engine"] = {"name": translation.engine}
    flags = FlagTable.of([*kernel_flags(), *chosen_flags(translation.tables, translation.registry)])
    for name, words in translation.given.items():
        if name not in translation.done:
            one(translation, known_flags.RENAMED_MEGATRON.get(name, name), name, words, flags)


def one(translation: Translation, name: str, typed: str, words: list[str], flags: FlagTable) -> None:
    """Translates one flag: the first case that matches applies."""
    defaults = known_flags.HARMLESS_DEFAULTS.get(name, ())
    if words[-1:] and words[-1] in defaults:
        return
    found, negated = flags.find(name)
    if name in known_flags.MISSING and (found is None or found.owner == "slime"):
        translation.missing(name, known_flags.MISSING[name])
    elif name.startswith(ROUTER_PREFIXES):
        of_router(translation, name, words, flags)
    elif name in known_flags.SHAPE:
        if name.endswith("-dropout") and translation.number(typed, float, 0.0):
            translation.note(
                name, f"{words[-1]}: dropout is not supported, since log-probs would be random", trains=True
            )
    elif name in known_flags.WITHOUT_EFFECT:
        translation.note(name, known_flags.WITHOUT_EFFECT[name])
    elif found is not None and found.field.exclude:
        # The plugin lists the option only to refuse it, with the reason.
        translation.note(
            typed, found.field.description or "not supported", trains=name in known_flags.TRAINING_MEGATRON
        )
    elif found is not None:
        set_key(translation, typed, words, found, negated)
    elif name.startswith("sglang-"):
        of_engine(translation, name, words)
    elif name in known_flags.MEGATRON:
        of_megatron(translation, name, words)
    else:
        # `done` has every flag that a rule has looked for, set or not.
        known = {
            *translation.done,
            *flags.by_name,
            *known_flags.HOOKS,
            *known_flags.MISSING,
            *known_flags.WITHOUT_EFFECT,
            *known_flags.MEGATRON,
        }
        close = near_matches(name, known)
        matches = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
        if typed not in translation.of_file:
            translation.note(typed, f"unknown flag{matches}", trains=True)
        elif not translation.reads_args:
            translation.note(
                typed, "in --custom-config-path: not a flag, and no function of this run reads args", trains=True
            )


def set_key(translation: Translation, typed: str, words: list[str], flag: Flag, negated: bool) -> None:
    many = takes_many(flag.field.annotation)
    if flag.is_switch:
        value: Any = not negated and (not words or words[-1].lower() == "true")
    elif not words:
        translation.note(typed, "requires a value", trains=True)
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


def of_router(translation: Translation, name: str, words: list[str], flags: FlagTable) -> None:
    """Upstream has one sglang-router for all engines. Here an engine has one for its servers, if a policy is set."""
    option = next(name.removeprefix(prefix) for prefix in ROUTER_PREFIXES if name.startswith(prefix))
    flag = f"router-{option}"
    found, negated = flags.find(flag)
    there = [known for known, of in flags.by_name.items() if "router_options" in of.path[:-1] and known == of.name]
    if translation.engine != "sglang":
        translation.note(name, f'an option of sglang-router; the engine is "{translation.engine}"')
    elif name == ROUTER_TIMEOUT:
        translation.put("engine.request_timeout", guessed(words))
    elif option != "policy" and "router-policy" not in translation.given:
        translation.note(
            name,
            "a router is started only with --router-policy, for the servers of an engine: pass --router-policy cache_aware "
            f"and --{flag}, with --sglang-servers; router.middlewares choose the engine of a request",
        )
    elif found is not None:
        set_key(translation, name, words, found, negated)
    elif there:
        close = near_matches(flag, there)
        matches = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
        translation.note(name, f"the installed sglang-router has no --{flag} that a run can set{matches}")
    else:
        # It is checked on a machine on which a router is installed.
        translation.put(f"engine.router_options.{option.replace('-', '_')}", guessed(words))


def of_megatron(translation: Translation, name: str, words: list[str]) -> None:
    if translation.backend != "megatron":
        trains = name in known_flags.TRAINING_MEGATRON
        translation.note(name, f'an option of Megatron; the backend is "{translation.backend}"', trains=trains)
        return
    translation.put(f"backend.{name.replace('-', '_')}", guessed(words))
