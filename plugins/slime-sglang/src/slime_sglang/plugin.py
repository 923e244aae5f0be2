"""Driver: what `engine.name = "sglang"` stands for. Its options are this plugin's own and the installed ServerArgs'."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field, create_model, field_validator, model_validator

from slime_core.contracts.driver import DriverConfig, Patch, TableOptions
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.paths import RunPath
from slime_core.contracts.setup import EngineLayout
from slime_core.errors import near_matches
from slime_sglang import router_args
from slime_sglang.option_choices import Choices
from slime_sglang.server.hook_table import HOOKS, in_source
from slime_sglang.server_args import OWNED, ServerOption, installed_options

if TYPE_CHECKING:
    from slime_core.contracts.memory import EngineLoad, EngineMemory
    from slime_sglang.engine import SglangEngine

HOW_TO_INSTALL: Final = (
    'SGLang is not installed here: `pip install "slime-sglang[server]"` on a GPU machine; on a CPU see the README of '
    "slime-sglang."
)


class SglangOptions(DriverConfig):
    servers: int = Field(default=1, ge=1)
    """Servers of one engine, each with an equal share of its devices. Several stand behind one router, or take turns."""
    router_policy: Literal["none", "cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"] = (
        "none"
    )
    """Starts sglang-router in front of the servers of an engine, with this policy. `consistent_hashing` keeps the
    requests of one session on one server. `none`: requests go to the servers directly."""
    prefill_servers: int = Field(default=0, ge=0)
    """That many of the servers only read prompts, and the others only write answers (prefill/decode disaggregation, with
    sglang-router between them). Keys and values go over `disaggregation_transfer_backend`, which must be installed."""
    router_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of sglang-router by the names of its RouterArgs, such as `balance_abs_threshold = 10`."""
    external_engine_addrs: tuple[str, ...] = ()
    """Servers that somebody else started, as `host:port` or URL, instead of own ones: `servers` of them for each
    engine, in order."""
    external_engine_token_file: RunPath | None = None
    """File with the bearer token (`--api-key`) of the external servers. A run's config is written to its folder, so the
    token itself does not stand in it."""
    pause_mode: Literal["abort", "retract", "in_place"] = "abort"
    """How requests wait for new weights. `abort`: they end, and go on as new requests with the tokens so far, whose
    keys and values the new weights compute; every token's version is exact. `retract`: SGLang does the same inside.
    `in_place`: they keep keys and values of the old weights. Both need a server that reports versions by token span,
    and switch the radix cache off, since it could not be flushed."""
    deterministic: bool | None = None
    """SGLang's deterministic inference: each request's seed decides its draws. It costs a third of the throughput on a
    GPU. By default on for own servers on a CPU, off elsewhere."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds until a server must answer. On a GPU the first start compiles kernels for minutes."""
    request_timeout: float = Field(default=14400.0, gt=0)
    """Seconds for one answer."""
    control_timeout: float = Field(default=300.0, gt=0)
    """Seconds for a call that is no generation: loading one bucket, flushing, pausing."""
    health_timeout: float = Field(default=30.0, gt=0)
    """Seconds within which a healthy server answers."""

    @field_validator("router_options", mode="after")
    @classmethod
    def _of_router(cls, value: dict[str, Any]) -> dict[str, Any]:
        return router_args.checked(value)

    @model_validator(mode="after")
    def _of_pause(self) -> SglangOptions:
        if self.pause_mode != "abort" and getattr(self, "disable_radix_cache", None) is False:
            raise ValueError(
                f'pause_mode = "{self.pause_mode}" needs disable_radix_cache = true: prefixes of old weights could not be '
                "flushed while requests wait"
            )
        return self


@cache
def options_of_server() -> tuple[ServerOption, ...]:
    """Those of ServerArgs that are not this plugin's own."""
    return tuple(option for option in installed_options() if option.name not in SglangOptions.model_fields)


def may_tell_experts() -> bool:
    """External servers may be of another version than the installed one, or it may not be installed at all."""
    names = {option.name for option in options_of_server()}
    return not names or "enable_return_routed_experts" in names


def make_config() -> type[SglangOptions]:
    """SglangOptions with the server's options beside its own. None: what SGLang does by default."""
    fields: dict[str, Any] = {}
    refused: dict[str, str] = {}
    choices: dict[str, Choices] = {}
    for option in options_of_server():
        if option.name in OWNED:
            refused[option.name] = f"decided by {OWNED[option.name]}"
        else:
            fields[option.name] = (option.type | None, Field(default=None, description=option.doc))
        refused |= dict.fromkeys(
            option.aliases,
            refused.get(option.name) or f"called {option.name} here: say --sglang-{option.name.replace('_', '-')}",
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
    checked = sorted(set(choices) & set(fields) - set(refused))
    validators: dict[str, Any] = {}
    if refused:
        validators["refuse"] = field_validator(*sorted(refused))(refuse)
    if checked:
        validators["check"] = field_validator(*checked)(check)
    return create_model("SglangConfig", __base__=SglangOptions, __validators__=validators, **fields)


def no_choice(value: object, known: Choices) -> str:
    names = [str(choice) for choice in known]
    close = near_matches(str(value), names)
    matched = f"; close match: {', '.join(close)}" if close else ""
    return f"not among the choices of the installed SGLang{matched}. Choices: {', '.join(names)}"


def server_options(config: Any) -> dict[str, Any]:
    """Those of the server's options that the run file gives."""
    names = {option.name for option in options_of_server()} - set(OWNED)
    return {name: value for name in sorted(names) if (value := getattr(config, name)) is not None}


TRANSFER_PACKAGES: Final = {
    "mooncake": "`pip install mooncake-transfer-engine`, without a GPU `pip install mooncake-transfer-engine-non-cuda`",
    "nixl": "`pip install nixl`",
}
"""How to get what prefilling and decoding servers hand keys and values over with. Packages are imported by these names."""


def problems_of_prefill(config: SglangOptions) -> list[str]:
    given = f"engine.prefill_servers = {config.prefill_servers}"
    problems = []
    if config.prefill_servers >= config.servers:
        problems.append(
            f"{given}, engine.servers = {config.servers}: some servers must be left to write answers. Say engine.servers = "
            f"{config.prefill_servers + 1} or more."
        )
    if config.router_policy == "none":
        problems.append(f"{given}: a router has to pair the servers. Choose an engine.router_policy.")
    if config.external_engine_addrs:
        problems.append(f"{given}: external servers cannot be paired by the run. Leave it out.")
    if config.pause_mode != "abort":
        problems.append(f'{given}, engine.pause_mode = "{config.pause_mode}": a request is on two servers. Use abort.')
    # SGLang's own default.
    backend = getattr(config, "disaggregation_transfer_backend", None) or "mooncake"
    if backend in TRANSFER_PACKAGES and importlib.util.find_spec(backend) is None:
        problems.append(
            f'{given}: keys and values go over "{backend}", which is not installed here: {TRANSFER_PACKAGES[backend]}. Another '
            "one: engine.disaggregation_transfer_backend."
        )
    return problems


def problem_of_devices(config: Any, num_devices: int, num_nodes: int, flag: str) -> str | None:
    """`flag`: where the number of an engine's devices is said."""
    servers, stages = config.servers, getattr(config, "pp_size", None) or 1
    if num_nodes > 1 and servers > 1:
        return (
            f"engine.servers = {servers}: the {num_devices} devices of an engine are on {num_nodes} machines, which one server "
            f"can span, but not several. Leave engine.servers out, or give each of more engines fewer devices ({flag})."
        )
    if num_devices % (servers * stages):
        shares = f"engine.servers = {servers}" + (f" of engine.pp_size = {stages}" if stages > 1 else "")
        return (
            f"{shares}: the {num_devices} device(s) of an engine cannot be shared equally. Say {flag} {servers * stages} or a "
            "multiple; on a CPU devices are processes."
        )
    return None


def problem_of_external(config: Any, num_engines: int) -> str | None:
    named, needed = len(config.external_engine_addrs), num_engines * config.servers
    if named >= needed:
        return None
    return (
        f"engine.external_engine_addrs names {named} servers, but {num_engines} engines of {config.servers} need {needed}. "
        "Name more, or lower launcher.rollout_num_gpus."
    )


def problem_of_experts(config: Any) -> str | None:
    """Where servers cannot be asked which experts they chose."""
    if config.router_policy == "none":
        return None
    # Its requests are a record of known fields, and the others do not reach the servers.
    return (
        f'engine.router_policy = "{config.router_policy}": sglang-router does not pass on that expert ids are asked for '
        "(train.use_rollout_routing_replay). Say none: requests then go to the servers directly, and router.middlewares has "
        "policies for them."
    )


def is_by_block(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "fp8" and bool(quantization.get("weight_block_size"))


class Sglang(EngineDriver):
    """SGLang servers as subprocesses, or ones that run already; sglang-router in front of them where asked."""

    Config = make_config()
    transports: ClassVar[tuple[str, ...]] = ("direct", "ipc", "distributed", "disk", "delta")
    may_offer: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.DETERMINISTIC,
            Capability.BATCH_INVARIANT,
            Capability.VERSION_SPANS,
            Capability.SLEEP,
            Capability.SCORES,
            Capability.HTTP,
            Capability.IMAGES,
        }
    ) | ({Capability.ROUTED_EXPERTS} if may_tell_experts() else frozenset())

    takes_quantized = True
    spans_nodes = True
    flag_aliases: ClassVar[Mapping[str, str]] = {
        "rollout-external-engine-addrs": "external_engine_addrs",
        "router-policy": "router_policy",
    }

    @classmethod
    def table_options(cls) -> Sequence[TableOptions]:
        return [TableOptions(option="router_options", prefix="router-", fields=router_args.fields())]

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        problems = []
        if not config.external_engine_addrs and not options_of_server():
            problems.append(f'engine.name = "sglang": {HOW_TO_INSTALL}')
        count = len(config.external_engine_addrs)
        if count % config.servers:
            problems.append(
                f"engine.external_engine_addrs names {count} servers, not a multiple of engine.servers = {config.servers}."
            )
        given = server_options(config)
        if count and given:
            problems.append(
                f"engine.{next(iter(given))} = {next(iter(given.values()))!r}: an option of a server that the run starts, but "
                "engine.external_engine_addrs names servers that run already. Leave it out."
            )
        if count and config.deterministic is not None:
            problems.append("engine.deterministic: whoever started the external servers has decided it. Leave it out.")
        if config.prefill_servers:
            problems += problems_of_prefill(config)
        if config.router_policy != "none" and not router_args.router_options():
            problems.append(
                f'engine.router_policy = "{config.router_policy}": sglang-router is not installed here: '
                '`pip install "slime-sglang[server]"`; on a CPU `pip install --no-deps sglang-router`.'
            )
        if config.router_options and config.router_policy == "none":
            problems.append("engine.router_options: there is no router. Choose an engine.router_policy.")
        if (config.dp_size if hasattr(config, "dp_size") else None) not in (None, 1) and not config.enable_dp_attention:
            problems.append(
                f"engine.dp_size = {config.dp_size}: SGLang loads new weights into one replica only. Use "
                f"engine.servers = {config.dp_size}, or more engines."
            )
        return problems

    @classmethod
    def patches(cls) -> Sequence[Patch]:
        return [
            Patch(target=target, purpose=hook.purpose, when=hook.when, found=in_source(target))
            for hook in HOOKS
            for target in hook.targets
        ]

    @classmethod
    def layout_problems(cls, config: Any, layout: EngineLayout) -> list[str]:
        problems = [problem_of_experts(config)] if layout.routed_experts else []
        if layout.offload and config.pause_mode != "abort":
            problems.append(
                f'engine.pause_mode = "{config.pause_mode}", launcher.offload_rollout: paused requests stay on the servers, '
                "which cannot give their memory back then. Use abort, or say --no-offload-rollout."
            )
        if config.external_engine_addrs:
            problems.append(problem_of_external(config, layout.num_engines))
        else:
            problems.append(problem_of_devices(config, layout.num_devices, layout.num_nodes, layout.devices_flag))
        return [problem for problem in problems if problem is not None]

    @classmethod
    def push_problems(cls, config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        """Of all schemes SGLang keeps float8 by block as it was loaded; others it rearranges, and loads nothing into them."""
        asked = getattr(config, "quantization", None)
        if asked is not None and quantization is None:
            return [
                f'engine.quantization = "{asked}": SGLang quantises weights when it starts, and takes no new ones afterwards. '
                "Leave it out, and say --rollout-load FOLDER with what `slime convert MODEL FOLDER --to fp8` makes."
            ]
        if quantization is not None and not is_by_block(quantization):
            return [
                f"model.rollout_load: its weights are quantised ({quantization.get('quant_method')}) otherwise than in float8 "
                "by block, and SGLang takes no new ones then. `slime convert MODEL FOLDER --to fp8` makes a folder for it."
            ]
        return []

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory | None:
        from slime_sglang.memory import engine_memory

        return engine_memory(config, load)

    @classmethod
    def build(cls, config: Any) -> SglangEngine:
        from slime_sglang.engine import SglangEngine

        return SglangEngine(config)
