"""The ASGI app: the SDK's endpoints. Each handler reads its message, and the service does the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

import pydantic
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import (
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    FutureRetrieveRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SessionHeartbeatRequest,
    UnloadModelRequest,
)

from slime_core.errors import SlimeError
from slime_tinker.access import Access, AsgiApp
from slime_tinker.checkpoints import iso, shown
from slime_tinker.errors import RequestError, not_found
from slime_tinker.json_response import json_response, refused
from slime_tinker.keys import Keys
from slime_tinker.records import CheckpointRecord, ModelRecord, RequestRecord
from slime_tinker.service import Service

Handler: TypeAlias = Callable[[Request, str], Awaitable[Response]]
MessageT = TypeVar("MessageT", bound=pydantic.BaseModel)

PREFIX: Final = "/api/v1/"
MOST_LISTED: Final = 1000
MAX_SEQ_ID: Final = 2**63 - 1
"""The largest integer of the journal."""
MAX_CHUNK: Final = 1024
"""Datums of a chunk, in which the SDK sends the data of a large forward_backward."""


class Text(pydantic.BaseModel):
    """Bodies of one field."""

    tinker_path: str = ""
    request_id: str = ""
    ttl_seconds: int | None = None


class Endpoints:
    """`handler(request, tenant)` for each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._holdings = service.holdings

    def routes(self) -> list[BaseRoute]:
        run, checkpoint = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Handler]] = [
            ("GET", "healthz", self._health),
            ("POST", "client/config", self._client_config),
            ("POST", "client/dynamic_config", self._client_dynamic_config),
            ("GET", "get_server_capabilities", self._capabilities),
            ("POST", "telemetry", self._telemetry),
            ("POST", "create_session", self._create_session),
            ("POST", "session_heartbeat", self._heartbeat),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{id}", self._session),
            ("POST", "sessions/{id}/finish", self._finish),
            ("POST", "create_model", self._create_model),
            ("POST", "unload_model", self._unload_model),
            ("POST", "get_info", self._info),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "optim_step", self._optim_step),
            ("POST", "save_weights", self._save_weights),
            ("POST", "save_weights_for_sampler", self._save_weights_for_sampler),
            ("POST", "load_weights", self._load_weights),
            ("POST", "weights_info", self._weights_info),
            ("POST", "create_sampling_session", self._create_sampling_session),
            ("GET", "samplers/{id:path}", self._sampler),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._retrieve),
            ("POST", "cancel_future", self._cancel),
            ("GET", "training_runs", self._runs),
            ("GET", run, self._run),
            ("GET", f"{run}/checkpoints", self._checkpoints_of_run),
            ("DELETE", checkpoint, self._delete_checkpoint),
            ("PUT", f"{checkpoint}/ttl", self._set_ttl),
            ("GET", "checkpoints", self._checkpoints),
        ]
        return [Route(PREFIX + path, handled(handler), methods=[method]) for method, path, handler in table]

    # --- Server -------------------------------------------------------------------------------------------------------

    async def _health(self, request: Request, tenant: str) -> Response:
        return json_response({"status": "ok"})

    async def _client_config(self, request: Request, tenant: str) -> Response:
        return json_response(
            {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": True, "fwdbwd_max_chunk_len": MAX_CHUNK}
        )

    async def _client_dynamic_config(self, request: Request, tenant: str) -> Response:
        return json_response({"sample_cancel_enabled": True})

    async def _capabilities(self, request: Request, tenant: str) -> Response:
        base = self._service.models.base
        model = {"model_name": base.name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
        return json_response({"supported_models": [model]})

    async def _telemetry(self, request: Request, tenant: str) -> Response:
        """What the SDK reports about itself is not kept."""
        return json_response({"status": "accepted"})

    # --- Sessions -----------------------------------------------------------------------------------------------------

    async def _create_session(self, request: Request, tenant: str) -> Response:
        session = await self._service.create_session(await message(request, CreateSessionRequest), tenant)
        return json_response({"type": "create_session", "session_id": session.id})

    async def _heartbeat(self, request: Request, tenant: str) -> Response:
        self._service.saw((await message(request, SessionHeartbeatRequest)).session_id, tenant)
        return json_response({"type": "session_heartbeat"})

    async def _sessions(self, request: Request, tenant: str) -> Response:
        offset, limit = page(request)
        own = [session.id for session in self._holdings.sessions.values() if session.tenant == tenant]
        return json_response({"sessions": own[offset : offset + limit]})

    async def _session(self, request: Request, tenant: str) -> Response:
        session = self._holdings.sessions.get(request.path_params["id"])
        if session is None or session.tenant != tenant:
            raise not_found(f"session {request.path_params['id']}: there is no such session of yours.")
        return json_response(
            {
                "training_run_ids": [model.id for model in self._holdings.models_of(session.id)],
                "sampler_ids": [sampler.id for sampler in self._holdings.samplers_of(session.id)],
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    async def _finish(self, request: Request, tenant: str) -> Response:
        session = self._holdings.session(request.path_params["id"], tenant)
        await self._service.finish_session(session, "its client has closed.")
        return json_response({})

    # --- Training -----------------------------------------------------------------------------------------------------

    async def _create_model(self, request: Request, tenant: str) -> Response:
        asked = await message(request, CreateModelRequest)
        return promised(await self._service.create_model(asked, await request.body(), tenant))

    async def _unload_model(self, request: Request, tenant: str) -> Response:
        model = self._holdings.model((await message(request, UnloadModelRequest)).model_id, tenant)
        await self._service.training.unload(model, "this model was unloaded.")
        return json_response({"type": "unload_model", "model_id": model.id})

    async def _info(self, request: Request, tenant: str) -> Response:
        model, base = (
            self._holdings.model((await message(request, GetInfoRequest)).model_id, tenant),
            self._service.models.base,
        )
        return json_response(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": base.name,
                "is_lora": model.spec.rank is not None,
                "lora_rank": model.spec.rank,
                "optimizer_config": {"type": "adamw"},
                "model_data": {"arch": base.arch, "model_name": base.name, "tokenizer_id": str(base.folder)},
            }
        )

    async def _forward_backward(self, request: Request, tenant: str) -> Response:
        body = await request.body()
        if request.headers.get("content-type", "").split(";")[0] != "application/x-protobuf":
            raise RequestError(
                "forward_backward: the body must be protobuf, as SDK 0.38 sends it; older ones are not served."
            )
        try:
            asked = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError:
            raise RequestError("forward_backward: the body is no ForwardBackwardRequest.") from None
        kind = "forward" if asked.forward_only else "forward_backward"
        return await self._train(asked.model_id, asked.seq_id, kind, body, tenant)

    async def _optim_step(self, request: Request, tenant: str) -> Response:
        asked = await message(request, OptimStepRequest)
        return await self._train(asked.model_id, asked.seq_id, "optim_step", await request.body(), tenant)

    async def _save_weights(self, request: Request, tenant: str) -> Response:
        asked = await message(request, SaveWeightsRequest)
        return await self._train(asked.model_id, asked.seq_id, "save_weights", await request.body(), tenant)

    async def _save_weights_for_sampler(self, request: Request, tenant: str) -> Response:
        asked = await message(request, SaveWeightsForSamplerRequest)
        return await self._train(asked.model_id, asked.seq_id, "save_weights_for_sampler", await request.body(), tenant)

    async def _load_weights(self, request: Request, tenant: str) -> Response:
        asked = await message(request, LoadWeightsRequest)
        if asked.model_id is None:
            return promised(await self._service.load_model(asked, await request.body(), tenant))
        return await self._train(asked.model_id, asked.seq_id, "load_weights", await request.body(), tenant)

    async def _train(self, model_id: str, seq_id: int | None, kind: str, body: bytes, tenant: str) -> Response:
        model = self._holdings.model(model_id, tenant)
        if seq_id is None or not 1 <= seq_id <= MAX_SEQ_ID:
            raise RequestError(
                f"seq_id = {seq_id}: must be from 1 to {MAX_SEQ_ID}; the requests of a model are counted from 1."
            )
        self._service.require_room(tenant)
        record = self._service.request(model.id, seq_id, kind, body, tenant)
        await self._service.training.submit(record)
        return promised(record)

    # --- Sampling -----------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, request: Request, tenant: str) -> Response:
        asked = await message(request, CreateSamplingSessionRequest)
        sampler = await self._service.create_sampling_session(asked, tenant)
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _sampler(self, request: Request, tenant: str) -> Response:
        sampler = self._holdings.sampler(request.path_params["id"], tenant)
        checkpoint = self._holdings.checkpoints.get(sampler.checkpoint or "")
        path = None if checkpoint is None or checkpoint.hidden else checkpoint.id
        return json_response(
            {"sampler_id": sampler.id, "base_model": self._service.models.base.name, "model_path": path}
        )

    async def _sample(self, request: Request, tenant: str) -> Response:
        asked = await message(request, SampleRequest)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise RequestError(
                "sampling_session_id and seq_id: one is missing; create_sampling_client begins a session."
            )
        if not 0 <= asked.seq_id <= MAX_SEQ_ID:
            raise RequestError(f"seq_id = {asked.seq_id}: must be from 0 to {MAX_SEQ_ID}.")
        sampler = self._holdings.sampler(asked.sampling_session_id, tenant)
        self._service.require_room(tenant)
        record = self._service.request(sampler.id, asked.seq_id, "asample", await request.body(), tenant)
        await self._service.sampling.submit(record)
        return json_response(
            {
                "request_id": record.id,
                "sample_sequence_ids": [f"{record.id}:{n}" for n in range(max(asked.num_samples, 0))],
            }
        )

    # --- Futures ------------------------------------------------------------------------------------------------------

    async def _retrieve(self, request: Request, tenant: str) -> Response:
        asked = await message(request, FutureRetrieveRequest)
        outcome = await self._service.futures.fetch(asked.request_id, tenant)
        if outcome is None:
            return json_response({"type": "try_again", "request_id": asked.request_id, "queue_state": "active"})
        media = "application/x-protobuf" if outcome.is_proto else "application/json"
        return Response(outcome.content, media_type=media)

    async def _cancel(self, request: Request, tenant: str) -> Response:
        request_id = (await message(request, Text)).request_id
        self._holdings.sampler(request_id.rpartition(":")[0], tenant)
        await self._service.sampling.cancel(request_id, "cancelled by the client.")
        return json_response({})

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    async def _runs(self, request: Request, tenant: str) -> Response:
        offset, limit = page(request)
        own = [model for model in self._holdings.models.values() if model.tenant == tenant]
        newest = sorted(own, key=lambda model: -model.created)
        cursor = {"offset": offset, "limit": limit, "total_count": len(newest)}
        return json_response(
            {"training_runs": [self._shown(model) for model in newest[offset : offset + limit]], "cursor": cursor}
        )

    async def _run(self, request: Request, tenant: str) -> Response:
        return json_response(self._shown(self._holdings.model(request.path_params["run"], tenant)))

    async def _checkpoints_of_run(self, request: Request, tenant: str) -> Response:
        model = self._holdings.model(request.path_params["run"], tenant)
        return json_response(
            {"checkpoints": [shown(own) for own in self._holdings.named_checkpoints(tenant, model.id)]}
        )

    async def _checkpoints(self, request: Request, tenant: str) -> Response:
        offset, limit = page(request)
        own = self._holdings.named_checkpoints(tenant)
        cursor = {"offset": offset, "limit": limit, "total_count": len(own)}
        return json_response({"checkpoints": [shown(one) for one in own[offset : offset + limit]], "cursor": cursor})

    async def _delete_checkpoint(self, request: Request, tenant: str) -> Response:
        checkpoint = self._named(request, tenant)
        self._service.checkpoints.require_unneeded(checkpoint.id)
        await self._service.checkpoints.delete(checkpoint, lasting=False)
        return json_response({})

    async def _set_ttl(self, request: Request, tenant: str) -> Response:
        ttl_s = (await message(request, Text)).ttl_seconds
        await self._service.checkpoints.set_ttl(self._named(request, tenant), ttl_s)
        return json_response({})

    async def _weights_info(self, request: Request, tenant: str) -> Response:
        checkpoint = self._holdings.checkpoint((await message(request, Text)).tinker_path, tenant)
        spec = checkpoint.spec
        return json_response(
            {
                "base_model": self._service.models.base.name,
                "is_lora": spec.rank is not None,
                "lora_rank": spec.rank,
                "train_unembed": spec.unembedding,
                "train_mlp": spec.mlp,
                "train_attn": spec.attention,
            }
        )

    def _named(self, request: Request, tenant: str) -> CheckpointRecord:
        parts = request.path_params
        return self._holdings.checkpoint(f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}", tenant)

    def _shown(self, model: ModelRecord) -> dict[str, Any]:
        own = self._holdings.named_checkpoints(model.tenant, model.id)
        last = {kind: next((shown(one) for one in own if one.kind == kind), None) for kind in ("training", "sampler")}
        return {
            "training_run_id": model.id,
            "base_model": self._service.models.base.name,
            "model_owner": model.tenant,
            "is_lora": model.spec.rank is not None,
            "lora_rank": model.spec.rank,
            "last_request_time": iso(model.seen),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": model.user_metadata,
        }


def asgi(service: Service, keys: Callable[[], Keys] | None) -> AsgiApp:
    """`keys`: those that are valid now; None: every caller is served."""
    app = Starlette(routes=Endpoints(service).routes(), exception_handlers={404: unknown_endpoint})
    limits = service.settings.limits
    return Access(app, keys, max_body_bytes=limits.max_body_bytes, max_held_bytes=limits.max_pending_bytes)


async def unknown_endpoint(request: Request, error: Exception) -> Response:
    return refused(404, f"{request.method} {request.url.path}: this server has no such endpoint.")


def handled(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """With the tenant, and errors as the SDK shows them."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request, request.scope["tenant"])
        except RequestError as error:
            return refused(error.status, str(error))
        except SlimeError as error:
            return refused(500, str(error))

    return endpoint


async def message(request: Request, kind: type[MessageT]) -> MessageT:
    """The body. RequestError that names the field which is wrong."""
    try:
        return kind.model_validate_json(await request.body())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestError(f"{field}: {first['msg']}.", status=422) from None


def promised(record: RequestRecord) -> Response:
    return json_response({"request_id": record.id, "model_id": record.owner})


def page(request: Request) -> tuple[int, int]:
    """Offset and limit of a listing."""
    try:
        offset, limit = (
            int(request.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", 20))
        )
    except ValueError:
        raise RequestError("offset and limit: must be whole numbers.") from None
    if offset < 0 or not 0 <= limit <= MOST_LISTED:
        raise RequestError(f"offset = {offset}, limit = {limit}: must be 0 or above, and limit at most {MOST_LISTED}.")
    return offset, limit
