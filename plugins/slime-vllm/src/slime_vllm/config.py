"""Options of the engine: this plugin's own, and those of vLLM's servers beside them. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import Field, create_model, field_validator, model_validator

from slime_core.contracts.paths import RunPath
from slime_serving.adapter_options import AdapterOptions
from slime_vllm.server_args import OWNED, shipped_options

DRAFTS: Final = ("speculative_config", "spec_method", "spec_model")
"""Options that turn on speculative decoding."""


class VllmOptions(AdapterOptions):
    compares_sent: ClassVar[bool] = True
    """See `slime_transports.plugin`."""
    python: RunPath | None = None
    """Interpreter that starts the servers, such as `.venv-vllm/bin/python`: it needs vLLM, and nothing of slime. By default the
    run's own."""
    servers: int = Field(default=1, ge=1)
    """Servers of one engine, each with an equal share of its devices; requests go to the one with the fewest, those of one
    session to one server."""
    external_engine_addrs: tuple[str, ...] = ()
    """Servers that the run did not start, as `host:port` or URL, instead of its own: `servers` of them for each engine, in
    order. Their workers must have the extension `slime_vllm_server.worker`."""
    external_engine_token_file: RunPath | None = None
    """File with the bearer token of the external servers."""
    pause_mode: Literal["abort", "retract", "in_place"] = "abort"
    """How requests wait for new weights. `abort`: they end, and continue as new requests with the tokens so far, whose
    keys and values the new weights compute. `retract`: they wait inside vLLM, which computes their keys and values again.
    `in_place`: they keep keys and values of the old weights; prefix caching is off then. Every token's version is exact."""
    sleep_level: int = Field(default=1, ge=1, le=2)
    """With devices that a trainer shares: what happens to the weights while it works. 1: they are copied to the host. 2: they
    are dropped, which saves the copy and the host's memory; every weight update must be sent before the next response, so
    not for runs that skip updates (`sync.update_weights_interval` above 1). Engines without weight updates copy them anyway."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds until a server must respond. On a GPU the first start compiles kernels for minutes."""
    request_timeout: float = Field(default=14400.0, gt=0)
    """Seconds for one response."""
    control_timeout: float = Field(default=300.0, gt=0)
    """Seconds for a call that is no generation: loading one bucket, pausing."""
    health_timeout: float = Field(default=30.0, gt=0)
    """Seconds within which a healthy server responds."""

    @model_validator(mode="after")
    def _of_pause(self) -> VllmOptions:
        if self.pause_mode == "in_place" and getattr(self, "enable_prefix_caching", None):
            raise ValueError(
                'pause_mode = "in_place" needs enable_prefix_caching = false: prefixes of old weights could not be dropped '
                "while requests wait"
            )
        return self


def make_config() -> type[VllmOptions]:
    """VllmOptions with the server's options beside its own. None: what vLLM does by default."""
    fields: dict[str, Any] = {}
    for option in shipped_options():
        if option.name in VllmOptions.model_fields:
            continue
        if option.name in OWNED:
            doc = f"Not an option of a run: decided by {OWNED[option.name]}."
            fields[option.name] = (Any, Field(default=None, description=doc, exclude=True, repr=False))
        else:
            doc = option.doc or "See vLLM's documentation."
            fields[option.name] = (option.type | None, Field(default=None, description=doc))

    def refuse(value: Any, info: Any) -> Any:
        if value is not None:
            raise ValueError(f"this is not an option of the engine: it is decided by {OWNED[info.field_name]}")
        return value

    refused = sorted(set(OWNED) & set(fields))
    validators: dict[str, Any] = {"refuse": field_validator(*refused)(refuse)}
    return create_model("VllmConfig", __base__=VllmOptions, __validators__=validators, **fields)


def server_options(config: Any) -> dict[str, Any]:
    """Those of the server's options that the run file gives."""
    names = {option.name for option in shipped_options()} - set(OWNED) - set(VllmOptions.model_fields)
    return {name: value for name in sorted(names) if (value := getattr(config, name)) is not None}


def parts_of(config: VllmOptions) -> int:
    """Into how many equal parts an engine's devices are divided, each with tensor parallelism."""
    chosen = server_options(config)
    return config.servers * chosen.get("pipeline_parallel_size", 1) * chosen.get("data_parallel_size", 1)
