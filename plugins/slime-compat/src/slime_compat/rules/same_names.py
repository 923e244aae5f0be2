"""Flags without a rule. Each is found in one of the tables, which do not depend on what is installed, or is unknown."""

from __future__ import annotations

from typing import Any, Final

from slime_compat import known_flags, megatron_flags, plugin_keys, sglang_flags
from slime_compat.flag_words import guessed, typed_as
from slime_compat.option_kinds import Kind
from slime_compat.translation import Translation
from slime_core.config.flags import Flag, FlagTable, kernel_flags, takes_many
from slime_core.errors import near_matches

ROUTER_PREFIXES: Final = ("router-", "sglang-router-")
ENGINE_PREFIX: Final = "sglang-"


def same_names(translation: Translation) -> None:
    translation.tables["backend"] = {"name": translation.backend} | translation.tables.get("backend", {})
    translation.tables["engine"] = {"name": translation.engine} | translation.tables.get("engine", {})
    flags = FlagTable.of(kernel_flags())
    for name, words in translation.given.items():
        if name not in translation.done:
            one(translation, name, words, flags)


def one(translation: Translation, name: str, words: list[str], flags: FlagTable) -> None:
    """Translates one flag: the first case that matches applies."""
    if words[-1:] and words[-1] in known_flags.HARMLESS_DEFAULTS.get(name, ()):
        return
    megatron = megatron_flags.RENAMED.get(name, name)
    option = megatron.removeprefix("no-")
    for table in (known_flags.MISSING, megatron_flags.MISSING):
        if name in table:
            translation.missing(name, table[name])
            return
    for effects in (known_flags.WITHOUT_EFFECT, megatron_flags.WITHOUT_EFFECT):
        if name in effects:
            translation.note(name, effects[name])
            return
    found, negated = flags.find(name)
    if name in megatron_flags.SHAPE:
        of_shape(translation, name, words)
    elif name in plugin_keys.KEYS:
        path, kind = plugin_keys.KEYS[name]
        of_engine_key(translation, name, words, path, kind)
    elif name in plugin_keys.OF_ALGORITHM:
        of_algorithm(translation, name, words)
    elif name.startswith(ROUTER_PREFIXES) and name != "sglang-router-request-timeout-secs":
        of_router(translation, name, words)
    elif name.startswith(ENGINE_PREFIX):
        of_engine(translation, name, words)
    elif option in megatron_flags.OPTIONS:
        of_megatron(translation, name, option, words, negated=option != megatron)
    elif found is not None:
        set_key(translation, name, words, found, negated)
    else:
        unknown(translation, name, flags)


def unknown(translation: Translation, name: str, flags: FlagTable) -> None:
    # `done` has every flag that a rule has looked for, set or not.
    known = {
        *translation.done,
        *flags.by_name,
        *known_flags.HOOKS,
        *known_flags.MISSING,
        *known_flags.WITHOUT_EFFECT,
        *plugin_keys.KEYS,
        *plugin_keys.OF_ALGORITHM,
        *megatron_flags.OPTIONS,
        *megatron_flags.RENAMED,
        *megatron_flags.MISSING,
        *megatron_flags.WITHOUT_EFFECT,
    }
    close = near_matches(name, known)
    matches = f"; close match: {', '.join('--' + c for c in close)}" if close else ""
    if name not in translation.of_file:
        translation.note(name, f"unknown flag{matches}", trains=True)
    elif not translation.reads_args:
        translation.note(
            name, "in --custom-config-path: not a flag, and no function of this run reads args", trains=True
        )


def set_key(translation: Translation, name: str, words: list[str], flag: Flag, negated: bool) -> None:
    """Sets a key of the kernel."""
    many = takes_many(flag.field.annotation)
    if flag.is_switch:
        value: Any = not negated and (not words or words[-1].lower() == "true")
    elif not words:
        translation.note(name, "requires a value", trains=True)
        return
    else:
        try:
            typed_words = [typed_as(flag, word) for word in words]
        except ValueError as error:
            translation.note(name, f"{error}", trains=True)
            return
        value = typed_words if many else typed_words[-1]
    translation.put(".".join(flag.path), value)


def put_read(
    translation: Translation, name: str, words: list[str], path: str, kind: Kind, *, negated: bool = False
) -> None:
    try:
        translation.put(path, kind.read(words, negated=negated))
    except ValueError as error:
        translation.note(name, f"{error}", trains=True)


def of_shape(translation: Translation, name: str, words: list[str]) -> None:
    if name.endswith("-dropout") and translation.number(name, float, 0.0):
        translation.note(name, f"{words[-1]}: dropout is not supported, since log-probs would be random", trains=True)


def of_algorithm(translation: Translation, name: str, words: list[str]) -> None:
    kind, readers = plugin_keys.OF_ALGORITHM[name]
    algorithm = translation.tables["algo"]["name"]
    if algorithm in readers:
        put_read(translation, name, words, f"algo.{name.replace('-', '_')}", kind)
    else:
        translation.note(name, f"left out, since it has no effect with {algorithm} upstream")


def of_engine_key(translation: Translation, name: str, words: list[str], path: str, kind: Kind) -> None:
    if path.startswith("engine.") and translation.engine != "sglang":
        translation.note(name, f'an option of SGLang; the engine is "{translation.engine}"')
    else:
        put_read(translation, name, words, path, kind)


def of_engine(translation: Translation, name: str, words: list[str]) -> None:
    option = name.removeprefix(ENGINE_PREFIX)
    key = sglang_flags.ALIASES.get(option, option.replace("-", "_"))
    if option in sglang_flags.MISSING:
        translation.missing(name, sglang_flags.MISSING[option])
    elif option in sglang_flags.OTHER_KEYS and not sglang_flags.OTHER_KEYS[option].startswith("engine."):
        translation.put(sglang_flags.OTHER_KEYS[option], guessed(words))
    elif translation.engine != "sglang":
        translation.note(name, f'an option of SGLang; the engine is "{translation.engine}"')
    elif option in sglang_flags.OTHER_KEYS:
        translation.put(sglang_flags.OTHER_KEYS[option], guessed(words))
    elif key in sglang_flags.LISTS:
        value = guessed(words)
        translation.put(f"engine.{key}", value if isinstance(value, list) else [value])
    elif key in sglang_flags.TEXTS:
        put_read(translation, name, words, f"engine.{key}", Kind.TEXT)
    else:
        translation.put(f"engine.{key}", guessed(words))


def of_router(translation: Translation, name: str, words: list[str]) -> None:
    """Upstream has one sglang-router for all engines. Here an engine has one for its servers, if a policy is set."""
    option = next(name.removeprefix(prefix) for prefix in ROUTER_PREFIXES if name.startswith(prefix))
    if translation.engine != "sglang":
        translation.note(name, f'an option of sglang-router; the engine is "{translation.engine}"')
    elif option == "policy":
        put_read(translation, name, words, "engine.router_policy", Kind.TEXT)
    elif "router-policy" not in translation.given:
        translation.note(
            name,
            "a router is started only with --router-policy, for the servers of an engine: pass --router-policy cache_aware "
            f"and --router-{option}, with --sglang-servers; router.middlewares choose the engine of a request",
        )
    else:
        translation.put(f"engine.router_options.{option.replace('-', '_')}", guessed(words))


def of_megatron(translation: Translation, name: str, option: str, words: list[str], *, negated: bool) -> None:
    if translation.backend != "megatron":
        translation.note(
            name,
            f'an option of Megatron; the backend is "{translation.backend}"',
            trains=option in megatron_flags.TRAINING,
        )
        return
    if option.startswith("moe-") and is_dense(translation):
        translation.note(name, "left out: the model has no experts, so it has no effect")
        return
    put_read(
        translation, name, words, f"backend.{option.replace('-', '_')}", megatron_flags.OPTIONS[option], negated=negated
    )


def is_dense(translation: Translation) -> bool:
    """Whether the flags give the shape of a model without experts."""
    return "num-layers" in translation.given and "num-experts" not in translation.given
