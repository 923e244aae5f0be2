"""Options of the engine: this plugin's own, and those of the installed ServerArgs beside them. Imports nothing heavy."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)  # fmt: skip

from slime_core.contracts.paths import RunPath
from slime_core.errors import near_matches
from slime_serving.adapter_options import AdapterOptions
from slime_sglang import router_args
from slime_sglang.option_choices import Choices
from slime_sglang.program import SGLANG
from slime_sglang.renamed_options import OtherName, other_names
from slime_sglang.server_args import OWNED, ServerOption, installed_folder, installed_options


class SglangOptions(AdapterOptions):
    python: RunPath | None = None
    """Interpreter that starts the servers, such as `.venv-sglang/bin/python`: it needs SGLang, and nothing of slime. By default
    the run's own."""
    servers: int = Field(default=1, ge=1)
    """Servers of one engine, each with an equal share of its devices. Several are used through one router, or round robin."""
    router_policy: Literal["none", "cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"] = (
        "none"
    )
    """Starts sglang-router in front of the servers of an engine, with this policy. `consistent_hashing` keeps the
    requests of one session on one server. `none`: requests go to the servers directly."""
    prefill_servers: int = Field(default=0, ge=0)
    """Number of servers that only prefill; the others only decode (prefill/decode disaggregation, through sglang-router). The
    KV cache is sent over `disaggregation_transfer_backend`, which must be installed."""
    prefill_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the prefilling servers alone, by SGLang's names, such as `chunked_prefill_size = 131072`."""
    decode_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the decoding servers alone."""
    router_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of sglang-router by the names of its RouterArgs, such as `balance_abs_threshold = 10`."""
    external_engine_addrs: tuple[str, ...] = ()
    """Servers that the run did not start, as `host:port` or URL, instead of its own: `servers` of them for each engine, in
    order."""
    external_engine_token_file: RunPath | None = None
    """File with the bearer token (`--api-key`) of the external servers. A run's config is written to its folder, so the
    token itself is not in it."""
    pause_mode: Literal["abort", "retract", "in_place"] = "abort"
    """How requests wait for new weights. `abort`: they end, and continue as new requests with the tokens so far, whose
    keys and values the new weights compute; every token's version is exact. `retract`: SGLang does the same inside.
    `in_place`: they keep keys and values of the old weights. Both need a server that reports versions by token span,
    and switch the radix cache off, since it could not be flushed."""
    sleep_level: Literal[1, 2] | None = None
    """With devices that a trainer shares: what happens to the weights while it works. 1: they are copied to the host, which
    takes seconds in each step. 2: they are dropped; then every weight update must be sent before the next response. By default
    2 where each step sends whole, plain weights, else 1."""
    deterministic: bool | None = None
    """SGLang's deterministic inference: each request's seed decides its draws. It costs a third of the throughput on a
    GPU. By default on for own servers on a CPU, off elsewhere."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds until a server must respond. On a GPU the first start compiles kernels for minutes."""
    request_timeout: float = Field(default=14400.0, gt=0)
    """Seconds for one response."""
    control_timeout: float = Field(default=300.0, gt=0)
    """Seconds for a call that is no generation: loading one bucket, flushing, pausing."""
    health_timeout: float = Field(default=30.0, gt=0)
    """Seconds within which a healthy server responds."""

    @field_validator("router_options", mode="after")
    @classmethod
    def _of_router(cls, value: dict[str, Any]) -> dict[str, Any]:
        return router_args.checked(value)

    @field_validator("prefill_options", "decode_options", mode="after")
    @classmethod
    def _of_some_servers(cls, value: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(set(value) & SglangOptions.model_fields.keys()):
            raise ValueError(f"{own[0]} is an option of the whole engine: set engine.{own[0]}")
        try:
            found = cls.model_validate(value)
        except ValidationError as error:
            problems = ("{}: {}".format(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
            raise ValueError("; ".join(problems)) from error
        return {name: getattr(found, name) for name in value}

    @model_validator(mode="after")
    def _of_pause(self) -> SglangOptions:
        if self.pause_mode != "abort" and getattr(self, "disable_radix_cache", None) is False:
            raise ValueError(
                f'pause_mode = "{self.pause_mode}" needs disable_radix_cache = true: prefixes of old weights could not be '
                "flushed while requests wait"
            )
        return self


class WithoutUnset(SglangOptions):
    """Of SGLang's options it writes those that are set. A run records its options: what is known without SGLang may change."""

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        return {name: v for name, v in written.items() if v is not None or name in SglangOptions.model_fields}


@cache
def options_of_server() -> tuple[ServerOption, ...]:
    """Those of ServerArgs that are not this plugin's own."""
    return tuple(option for option in installed_options() if option.name not in SglangOptions.model_fields)


@cache
def names_of_other_versions() -> tuple[OtherName, ...]:
    """Those that the installed SGLang has under another name."""
    return tuple(other_names({option.name for option in options_of_server()} - set(OWNED)))


def may_return_experts() -> bool:
    """Whether servers may support expert ids. True if SGLang is not installed here; servers elsewhere may have another
    version."""
    return "enable_return_routed_experts" in {option.name for option in options_of_server()}


def make_config() -> type[SglangOptions]:
    """SglangOptions with the server's options beside its own. None: what SGLang does by default."""
    fields: dict[str, Any] = {}
    types = {option.name: option.type for option in options_of_server()}
    refused: dict[str, str] = {}
    choices: dict[str, Choices] = {}
    for option in options_of_server():
        if option.name in OWNED:
            refused[option.name] = f"decided by {OWNED[option.name]}"
        else:
            fields[option.name] = (option.type | None, Field(default=None, description=option.doc))
        refused |= dict.fromkeys(
            option.aliases,
            refused.get(option.name) or f"called {option.name} here: pass --sglang-{option.name.replace('_', '-')}",
        )
        if option.choices:
            choices[option.name] = option.choices

    def refuse(value: Any, info: Any) -> Any:
        if value is not None:
            raise ValueError(f"this is not an option of the engine: it is {refused[info.field_name]}")
        return value

    def check(value: Any, info: Any) -> Any:
        known = choices[info.field_name]
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one not in known:
                raise ValueError(no_choice(one, known))
        return value

    refused = {name: why for name, why in refused.items() if name not in SglangOptions.model_fields}
    for name, why in refused.items():
        doc = f"Not an option of a run: {why}."
        fields[name] = (Any, Field(default=None, description=doc, exclude=True, repr=False))
    for other in names_of_other_versions():
        doc = f"The name of {other.current} in other versions of SGLang."
        fields[other.name] = (
            other.type(types[other.current]) | None,
            Field(default=None, description=doc, exclude=True, repr=False),
        )
    checked = sorted(set(choices) & set(fields) - set(refused))
    validators: dict[str, Any] = {"rename": model_validator(mode="before")(under_installed_names)}
    if refused:
        validators["refuse"] = field_validator(*sorted(refused))(refuse)
    if checked:
        validators["check"] = field_validator(*checked)(check)
    base = WithoutUnset if installed_folder() is None else SglangOptions
    return create_model("SglangConfig", __base__=base, __validators__=validators, **fields)


def under_installed_names(options: Any) -> Any:
    """The options, with those of other versions also under the names of the installed one. ValueError if both are set."""
    if not isinstance(options, dict):
        return options
    renamed = dict(options)
    for other in names_of_other_versions():
        value = options.get(other.name)
        if value is None or (other.is_switch and not value):
            continue
        if renamed.get(other.current) is not None:
            raise ValueError(f"{other.name} is called {other.current} in the installed SGLang: set only one of them")
        renamed[other.current] = other.value(value)
    return renamed


def known_version() -> str:
    """The version whose options are known."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return SGLANG.tested[0]


def rename_notices(config: Any) -> list[str]:
    """A sentence for each option that is set under the name of another version."""
    return [
        f"engine.{other.name}: SGLang {known_version()} calls it {other.current}, which is set to "
        f"{json.dumps(getattr(config, other.current))}."
        for other in names_of_other_versions()
        if getattr(config, other.name) and getattr(config, other.current) is not None
    ]


def no_choice(value: object, known: Choices) -> str:
    names = [str(choice) for choice in known]
    close = near_matches(str(value), names)
    matched = f"; close match: {', '.join(close)}" if close else ""
    return f"not among the choices of the installed SGLang{matched}. Choices: {', '.join(names)}"


def server_options(config: Any) -> dict[str, Any]:
    """Those of the server's options that the run file gives, for all servers."""
    names = {option.name for option in options_of_server()} - set(OWNED)
    return {name: value for name in sorted(names) if (value := getattr(config, name)) is not None}


def role_of(config: SglangOptions, place: int) -> Literal["prefill", "decode"] | None:
    """What the server at `place`, from 0, does; None: both."""
    if not config.prefill_servers:
        return None
    return "prefill" if place < config.prefill_servers else "decode"


def options_of_role(config: SglangOptions, role: Literal["prefill", "decode"] | None) -> dict[str, Any]:
    """Those that the run file gives for servers with this role alone."""
    return {} if role is None else {"prefill": config.prefill_options, "decode": config.decode_options}[role]
