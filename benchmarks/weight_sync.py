"""How long new weights take to reach an SGLang server: Qwen3 shapes with random weights, every transport.

    python benchmarks/weight_sync.py --shape qwen3-4b --transports ipc,distributed,disk,delta --buckets 512,2048
    python benchmarks/weight_sync.py --shape tiny --device cpu

It uses the code of a run: the backend's export, the transport's sender on each trainer rank, `WeightTransport.push` and the
engine. Two times: `push_s` is the weight update alone, with the engine paused; `fresh_s` is the time from the change of the
weights on the trainer's devices, through pause, update and resume, to the first response by the new version.

--source whole: the tensors are whole and in bfloat16 on one rank. --source fsdp, megatron: the backend's export, which gathers
from --trainer-ranks ranks (megatron: tensor-parallel ones) and converts. Between two updates one row in twenty of every matrix
changes, which `delta` has to send. With transport ipc the server is on the trainer's devices, with the others on the devices
after them (disk and delta share the trainer's devices if no others are left; leave memory for it: --engine
'{"mem_fraction_static": 0.3}').
--to fp8: the server starts from a folder of `slime convert --to fp8`, and tensors are rounded in its blocks when they are sent.
`copy_gb_s` is what one copy of 1 GiB reaches: on the device (ipc), to the next device (distributed), to the host (disk
and delta). One JSON line for each case, the median of --repeats after one push that is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from slime_core import groups
from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.contracts.engine import RolloutEngine
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import EngineEndpoint, EngineSetup, TrainerSetup
from slime_core.contracts.transport import SenderSetup, SentReport
from slime_core.registry import Registry, bind
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_core.workers.engine_format import converted
from slime_models.convert import convert

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen3-4b": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
    | {"tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "tie_word_embeddings": True},
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 1024}
MIB = 2**20
CHANGED = 20
"""One row in so many changes."""


def write_model(folder: Path, shape: str, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**COMMON | SHAPES[shape]), dtype=torch.bfloat16)
    model.save_pretrained(folder)


class Source:
    """The trainer's weights on one rank."""

    def __init__(self, asked: argparse.Namespace, model: Path, rank: int, port: int) -> None:
        self._device = asked.device
        if asked.source == "whole":
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(asked.device)
            self._backend = None
            tied = self._model.config.tie_word_embeddings
            state = self._model.state_dict()
            self._whole = {name: state[name] for name in state if not (tied and name == "lm_head.weight")}
            return
        registry = Registry()
        resolved = registry.resolve(groups.BACKENDS, asked.source, where="benchmark")
        options = {"tensor_model_parallel_size": asked.trainer_ranks} if asked.source == "megatron" else {}
        self._backend = resolved.driver.build(bind(resolved, options, where="backend"))
        self._backend.setup(
            TrainerSetup(
                role="actor",
                rank=rank,
                world_size=asked.trainer_ranks,
                local_rank=rank,
                rendezvous=f"tcp://127.0.0.1:{port}",
                device=asked.device,
                model_path=model,
                optimizer=OptimizerConfig(),
                total_steps=1,
                seed=0,
            )
        )
        ready = self._backend._ready
        self._model = ready.model.model if asked.source == "fsdp" else torch.nn.ModuleList(ready.bare)

    def change(self) -> None:
        """Changes the weights like an optimizer step; returns when that is complete."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local[::CHANGED] *= 1.0625
        if self._device == "cuda":
            torch.cuda.synchronize()

    def export(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor] | None]:
        if self._backend is not None:
            yield from self._backend.export_weights(all_ranks=all_ranks)
            return
        for name, tensor in self._whole.items():
            yield {name: tensor}

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


class Rank:
    """A trainer rank: its weights, and one sender after the other."""

    def __init__(self, asked: argparse.Namespace, model: Path, rank: int, port: int) -> None:
        if asked.device == "cuda":
            torch.cuda.set_device(rank)
        # A sender has to set NCCL's switches before the backend's group is there, as in a trainer's process.
        self._senders = {case: sender_of(*case) for case in cases(asked)}
        self._source = Source(asked, model, rank, port)
        self._format = None if asked.to is None else converter_of(asked.to).driver.tensor_format(engine_folder(model))
        self._setup = {"rank": rank, "world_size": asked.trainer_ranks, "device": asked.device, "model_path": model}
        self._sender: Any = None

    def begin(self, case: tuple[str, int], run_dir: Path) -> None:
        self._sender = self._senders[case]
        self._sender.setup(SenderSetup(run_dir=run_dir, colocated=case[0] == "ipc", **self._setup))

    def change(self) -> None:
        self._source.change()

    def send(self, version: int, engines: Sequence[EngineEndpoint]) -> SentReport:
        report: SentReport = self._sender.send(self._export, version, engines)
        return report

    def _export(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor] | None]:
        layers = self._source.export(all_ranks=all_ranks)
        return layers if self._format is None else map(partial(converted, self._format), layers)

    def end(self) -> None:
        self._sender.close()

    def close(self) -> None:
        self._source.close()


def other_rank(pipe: Any, *arguments: Any) -> None:
    rank = Rank(*arguments)
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        method, *given = call
        pipe.send(getattr(rank, method)(*given))
    rank.close()


class Ranks:
    """`slime_core.contracts.transport.TrainerLink`: the first rank is here, the others are processes."""

    def __init__(self, asked: argparse.Namespace, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for number in range(1, asked.trainer_ranks):
            own, theirs = context.Pipe()
            context.Process(target=other_rank, args=(theirs, asked, model, number, port), daemon=True).start()
            self._pipes.append(own)
        self._first = Rank(asked, model, 0, port)
        for pipe in self._pipes:
            pipe.recv()

    def call(self, method: str, *given: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, *given))
        return [getattr(self._first, method)(*given), *(pipe.recv() for pipe in self._pipes)]

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> Sequence[SentReport]:
        return await asyncio.to_thread(self.call, "send", version, engines)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        self._first.close()


class Engines:
    """`slime_core.contracts.transport.EngineGroup` of one engine."""

    num_engines = 1

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    async def call_all(self, method: str, *given: Any) -> list[Any]:
        return [await getattr(self._engine, method)(*given)]


def converter_of(name: str) -> BoundPlugin:
    return PluginSpec(group=groups.CONVERTERS, name=name, options={}).resolve(Registry())


def engine_folder(model: Path) -> Path:
    return model.with_name("model-of-engines")


def driver_of(name: str) -> Any:
    return Registry().resolve(groups.TRANSPORTS, name, where="benchmark")


def config_of(name: str, mib: int) -> Any:
    return bind(driver_of(name), {"update_weight_buffer_size": mib * MIB}, where="sync")


def sender_of(name: str, mib: int) -> Any:
    return driver_of(name).driver.build_sender(config_of(name, mib))


def cases(asked: argparse.Namespace) -> list[tuple[str, int]]:
    return [(name, mib) for name in asked.transports for mib in asked.buckets]


def copy_gb_s(transport: str, device: str) -> float | None:
    """GB/s of one copy on the path of this transport; None if it cannot be measured."""
    if transport == "distributed" and (device != "cuda" or torch.cuda.device_count() < 2):
        return None
    source = torch.zeros(1024 * MIB if device == "cuda" else 64 * MIB, dtype=torch.uint8, device=device)
    if transport == "distributed":
        target = torch.empty_like(source, device="cuda:1")
    elif transport == "ipc" or device == "cpu":
        target = torch.empty_like(source)
    else:
        target = torch.empty_like(source, device="cpu", pin_memory=True)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            for number in range(torch.cuda.device_count()):
                torch.cuda.synchronize(number)
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times[1:]) / 1e9


async def check_response(engine: RolloutEngine, version: int) -> None:
    request = GenerateRequest(
        request_id=f"fresh/{version}",
        token_ids=np.array([5, 6, 7], np.int32),
        sampling=SamplingParams(max_new_tokens=1),
        seed=version,
    )
    (got,) = await engine.generate([request])
    assert [span.version for span in got.spans] == [version], got


def shares_devices(transport: str, asked: argparse.Namespace) -> bool:
    """Whether the server is on the trainer's devices. Always true on a CPU."""
    if asked.device == "cpu" or transport == "ipc":
        return True
    return transport != "distributed" and torch.cuda.device_count() < asked.trainer_ranks + asked.engine_ranks


async def measure(asked: argparse.Namespace, folder: Path, ranks: Ranks, colocated: bool) -> None:
    """Measures all cases on one server, which is on the trainer's devices or on those after them."""
    engine = Registry().resolve(groups.ENGINES, asked.program, where="benchmark")
    built: RolloutEngine = engine.driver.build(bind(engine, asked.engine, where="engine"))
    index = 0 if colocated or asked.device == "cpu" else -(-asked.trainer_ranks // asked.engine_ranks)
    setup = EngineSetup(
        index=index,
        model_path=folder / "model" if asked.to is None else engine_folder(folder / "model"),
        device=asked.device,
        seed=0,
        max_context_len=512,
        max_batch=16,
        run_dir=folder,
        num_devices=asked.engine_ranks,
        first_device=index * asked.engine_ranks,
        transport=next((name for name in ("delta", "disk") if name in asked.transports), asked.transports[0]),
    )
    version = 0
    await built.start(setup)
    try:
        for name, mib in cases(asked):
            if shares_devices(name, asked) != colocated:
                continue
            ranks.call("begin", (name, mib), folder / f"{name}-{mib}")
            transport = driver_of(name).driver.build(config_of(name, mib))
            pushes, fresh, sent = [], [], 0
            for _ in range(asked.repeats + 1):
                version += 1
                ranks.call("change")
                began = time.perf_counter()
                await built.pause()
                report = await transport.push(ranks, Engines(built), version)
                await built.resume()
                await check_response(built, version)
                fresh.append(time.perf_counter() - began)
                pushes.append(report.seconds)
                sent = report.bytes_sent
            ranks.call("end")
            show(asked, name, mib, sent, pushes[1:], fresh[1:], folder)
    finally:
        await built.stop()


def show(
    asked: argparse.Namespace,
    transport: str,
    mib: int,
    sent: int,
    pushes: Sequence[float],
    fresh: Sequence[float],
    folder: Path,
) -> None:
    whole = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    push = statistics.median(pushes)
    copy = copy_gb_s(transport, asked.device)
    print(
        json.dumps(
            {
                "program": asked.program,
                "shape": asked.shape,
                "source": asked.source,
                "to": asked.to,
                "trainer_ranks": asked.trainer_ranks,
                "engine_ranks": asked.engine_ranks,
                "transport": transport,
                "bucket_mib": mib,
                "model_gb": round(whole / 1e9, 3),
                "sent_gb": round(sent / 1e9, 3),
                "push_s": round(push, 4),
                "push_s_min_max": [round(min(pushes), 4), round(max(pushes), 4)],
                "gb_s": round(whole / push / 1e9, 2),
                "copy_gb_s": copy and round(copy, 1),
                "share_of_copy": copy and round(whole / push / 1e9 / copy, 3),
                "fresh_s": round(statistics.median(fresh), 4),
                "repeats": len(pushes),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["ipc", "distributed", "disk"])
    parser.add_argument("--buckets", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048])
    parser.add_argument("--source", choices=["whole", "fsdp", "megatron"], default="whole")
    parser.add_argument("--trainer-ranks", type=int, default=1)
    parser.add_argument("--engine-ranks", type=int, default=1, help="devices of the engine (tensor parallel)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--to", help="format of the engine's weights, by the name of a converter")
    parser.add_argument("--program", default="sglang", help="name of the engine: sglang or vllm")
    parser.add_argument("--engine", type=json.loads, default={}, help="the engine's options as JSON")
    asked = parser.parse_args()
    if asked.source == "whole" and asked.trainer_ranks > 1:
        parser.error("--source whole is one rank; several ranks need --source fsdp or megatron")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", asked.shape, asked.device)
        if asked.to is not None:
            convert(
                converter_of(asked.to),
                folder / "model",
                engine_folder(folder / "model"),
                workers=1,
                report=lambda *progress: None,
            )
        ranks = Ranks(asked, folder / "model")
        try:
            # One server for colocated transports, one for the others.
            for colocated in sorted({shares_devices(name, asked) for name in asked.transports}, reverse=True):
                asyncio.run(measure(asked, folder, ranks, colocated))
        finally:
            ranks.close()


if __name__ == "__main__":
    main()
