"""`slime serve` on a GPU: forward_backward and asample through the Tinker SDK, beside the same through the session.

    python benchmarks/tinker_gpu.py                                    # Qwen3-4B's shape, SGLang and slime-fsdp on one GPU
    python benchmarks/tinker_gpu.py --shape tiny --device cpu --engine '{"name": "local"}'

A random model of the shape; trainer and server share the GPU, and neither gives its memory to the other. One adapter takes
--rows x --tokens tokens to a forward_backward and a step, and --rows prompts are sampled, --new-tokens each, with what it was
then; --repeats times after a first one. Then --adapters adapters take a step each, and the prompts are shared among them. Then
the same session is served, and a program with the unmodified SDK does what the one adapter did. One JSON line: seconds of
each, the shares of the direct call's speed, memory, and how far the engine's log-probs of what it sampled with the adapter are
from the trainer's: beside those of the base, and of an adapter that is new (rounding alone).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rollout_gpu import SHAPES, toml, write_model

from slime_core.registry import Registry
from slime_core.types.completion import Completion, SamplingParams
from slime_serving.listener import listen
from slime_session import Datum, TrainingSession, open_session
from slime_session.adapter import Adapter, Snapshot
from slime_tinker.run_command import FORCED, NOT_USED
from slime_tinker.serve import BACKLOG, serve
from slime_tinker.session_adapters import SessionAdapters
from slime_tinker.settings import Limits, Settings

PROMPT_TOKENS = 64
LR = 1e-3
"""Large: log-probs would show an engine that leaves a part of the adapter out."""
GIB = 2**30
SGLANG = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.5,
}
CLIENT = """
import json, sys, time
import tinker
from tinker import types

asked = json.loads(sys.argv[1])
import warnings
warnings.simplefilter("ignore")
service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(
    base_model=model, rank=asked["rank"], seed=0, train_unembed=asked["unembedding"]
).result()
data = []
for row in asked["rows"]:
    inputs = {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
    data.append(types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
train, sample, tokens = [], [], []
for _ in range(asked["repeats"] + 1):
    began = time.perf_counter()
    training.forward_backward(data, "cross_entropy").result()
    train.append(time.perf_counter() - began)
    training.optim_step(types.AdamParams(learning_rate=asked["lr"])).result()
began = time.perf_counter()
sampler = training.save_weights_and_get_sampling_client().result()
saved = time.perf_counter() - began
for number in range(asked["repeats"] + 1):
    params = types.SamplingParams(max_tokens=asked["new_tokens"], temperature=1.0)
    began = time.perf_counter()
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)
        for prompt in asked["prompts"][number]
    ]
    tokens.append(sum(len(future.result().sequences[0].tokens) for future in futures))
    sample.append(time.perf_counter() - began)
print("RESULT " + json.dumps({"train": train, "sample": sample, "tokens": tokens, "saved": saved}), flush=True)
"""


def run_file(asked: argparse.Namespace, folder: Path) -> str:
    return f"""
name = "served"
seed = 0
backend = {toml({"max_adapters": asked.adapters, **asked.backend})}
engine = {toml(asked.engine)}
launcher = {{ name = "local", device = "{asked.device}", colocate = true, offload_train = false, offload_rollout = false }}
runs_dir = "{folder}/runs"
[model]
hf_checkpoint = "model"
[train]
max_tokens_per_gpu = {asked.train_tokens}
[sync]
transport = "{"direct" if asked.engine["name"] == "local" else "frozen"}"
"""


class Memory:
    """Of the GPU: what torch of this process had at most, and what all processes have."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.begin()

    def begin(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def found(self) -> dict[str, float]:
        if not self._on_gpu:
            return {}
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "trainer_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
            "trainer_now_gib": round(torch.cuda.memory_allocated() / GIB, 2),
            "device_gib": round((total - free) / GIB, 2),
        }


class Direct:
    """The calls of a session, without a server."""

    def __init__(self, session: TrainingSession, asked: argparse.Namespace, rows: list[list[int]]) -> None:
        self._session = session
        self._asked = asked
        self._rows = rows
        self._sampling = SamplingParams(max_new_tokens=asked.new_tokens, temperature=1.0)

    def add(self, name: str) -> Adapter:
        return self._session.add_adapter(name, rank=self._asked.rank, seed=0, unembedding=self._asked.unembedding)

    def train(self, adapter: Adapter) -> float:
        """Seconds of the forward_backward; a step follows."""
        datums = [
            Datum(tokens=row, prompt_length=1, loss_weights=np.ones(len(row) - 1, np.float32)) for row in self._rows
        ]
        began = time.perf_counter()
        adapter.forward_backward(self._session.batch(datums), loss="sft")
        seconds = time.perf_counter() - began
        adapter.optim_step(lr=LR)
        return seconds

    def sample(self, prompts: Sequence[list[int]], snapshots: Sequence[Snapshot]) -> tuple[float, int]:
        """Seconds and tokens. The prompts are shared among the snapshots."""
        seconds, responses = self._sampled(prompts, snapshots)
        return seconds, sum(len(response.token_ids) for response in responses)

    def apart(self, prompts: Sequence[list[int]], adapter: Adapter, snapshot: Snapshot | None) -> float:
        """Mean of |engine's - adapter's log-prob|, in nats. `snapshot`: None: the engine samples with the base."""
        _, responses = self._sampled(prompts, [snapshot])
        datums = [
            Datum(
                tokens=[*prompt, *response.token_ids.tolist()],
                prompt_length=len(prompt),
                loss_weights=np.ones(len(response.token_ids), np.float32),
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        theirs = np.concatenate([response.log_probs for response in responses])
        return float(np.abs(adapter.forward(self._session.batch(datums)) - theirs).mean())

    def _sampled(
        self, prompts: Sequence[list[int]], snapshots: Sequence[Snapshot | None]
    ) -> tuple[float, list[Completion]]:
        began = time.perf_counter()
        futures = [
            self._session.start_generating(
                [prompt], self._sampling, seeds=[place], snapshot=snapshots[place % len(snapshots)]
            )
            for place, prompt in enumerate(prompts)
        ]
        responses = [future.result()[0] for future in futures]
        return time.perf_counter() - began, responses


def log(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def measure(session: TrainingSession, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    letters = random.Random(0)
    most = min(SHAPES[asked.shape].get("vocab_size", 150_000), 150_000) - 10
    rows = [[letters.randrange(10, most) for _ in range(asked.tokens + 1)] for _ in range(asked.rows)]
    # New prompts each time: no cache has them.
    prompts = [
        [[letters.randrange(10, most) for _ in range(PROMPT_TOKENS)] for _ in range(asked.rows)]
        for _ in range(2 * asked.repeats + 4)
    ]
    memory, direct = Memory(asked.device), Direct(session, asked, rows)
    adapter = direct.add("adapter-0")
    few = prompts[0][:8]
    # A new adapter changes nothing: what both sides' arithmetic makes.
    diffs = {"new": direct.apart(few, adapter, None)}
    train = [direct.train(adapter) for _ in range(asked.repeats + 1)]
    log(f"direct forward_backward {train}")
    began = time.perf_counter()
    snapshot = adapter.snapshot()
    saved = time.perf_counter() - began
    sampled = [direct.sample(prompts[number], [snapshot]) for number in range(asked.repeats + 1)]
    log(f"direct asample {sampled}")
    with_one = memory.found()
    diffs |= {"adapter": direct.apart(few, adapter, snapshot), "base": direct.apart(few, adapter, None)}
    log(f"log-probs apart {diffs}")
    memory.begin()
    snapshots = [snapshot]
    shared = share(direct, snapshots, prompts[asked.repeats + 1 : asked.repeats + 3], asked.adapters)
    log(f"{asked.adapters} adapters {shared}")
    with_all = memory.found()
    for one in (*snapshots, *session.adapters.values()):
        one.drop() if isinstance(one, Snapshot) else one.remove()
    found = through_the_sdk(session, asked, folder, rows, prompts[-asked.repeats - 1 :])
    log(f"through the SDK {found}")
    speeds = [tokens / seconds for seconds, tokens in sampled[1:]]
    through = [tokens / seconds for seconds, tokens in zip(found["sample"][1:], found["tokens"][1:], strict=True)]
    return {
        "shape": asked.shape,
        "engine": asked.engine["name"],
        "backend": asked.backend["name"],
        "rank": asked.rank,
        "unembedding": asked.unembedding,
        "rows": asked.rows,
        "tokens": asked.tokens,
        "new_tokens": asked.new_tokens,
        "forward_backward_s": rounded(train),
        "forward_backward_sdk_s": rounded(found["train"]),
        "forward_backward_ratio": round(min(train[1:]) / min(found["train"][1:]), 3),
        "snapshot_s": round(saved, 3),
        "snapshot_sdk_s": round(found["saved"], 3),
        "asample_tok_s": rounded(speeds, 0),
        "asample_sdk_tok_s": rounded(through, 0),
        "asample_ratio": round(max(through) / max(speeds), 3),
        "asample_all_adapters_tok_s": rounded([tokens / seconds for seconds, tokens in shared], 0),
        "mean_logprob_diff": {name: round(diff, 5) for name, diff in diffs.items()},
        "with_1": with_one,
        f"with_{asked.adapters}": with_all,
    }


def share(
    direct: Direct, snapshots: list[Snapshot], prompts: Sequence[Sequence[list[int]]], number: int
) -> list[tuple[float, int]]:
    """Adds the snapshots of further adapters, each with a step, until there are `number`, and samples the prompts with them.
    Returns seconds and tokens of each round."""
    for place in range(len(snapshots), number):
        adapter = direct.add(f"adapter-{place}")
        direct.train(adapter)
        snapshots.append(adapter.snapshot())
    return [direct.sample(each, snapshots) for each in prompts]


def rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    return [round(value, digits) for value in values]


def through_the_sdk(
    session: TrainingSession, asked: argparse.Namespace, folder: Path, rows: list[list[int]], prompts: list[Any]
) -> dict[str, Any]:
    """Serves the session until the client has ended."""
    listener = listen("127.0.0.1", 0, backlog=BACKLOG)
    settings = Settings(state=folder / "state", limits=Limits())
    models = SessionAdapters(session, name="random")
    output: list[str] = []
    given = {
        "rank": asked.rank,
        "unembedding": asked.unembedding,
        "rows": rows,
        "prompts": prompts,
        "repeats": asked.repeats,
        "new_tokens": asked.new_tokens,
        "lr": LR,
    }
    environment = os.environ | {
        "TINKER_API_KEY": "tml-any",
        "TINKER_BASE_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    (folder / "client.py").write_text(CLIENT.replace("sys.argv[1]", "open(sys.argv[1]).read()"))
    (folder / "asked.json").write_text(json.dumps(given))

    def client() -> None:
        command = [sys.executable, str(folder / "client.py"), str(folder / "asked.json")]
        try:
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=asked.client_s)
            output.append(ended.stdout)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # The server ends by it, and passes it on.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    in_thread(client)
    serve(
        models,
        settings,
        Registry.from_environment(),
        listener=listener,
        keys=None,
        tls=None,
        ready=lambda: log("served"),
    )
    lines = [line for text in output for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"the client ended without a result: {output}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="client", daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--train-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--client-s", type=float, default=240, help="seconds for the client")
    parser.add_argument(
        "--without-unembedding", dest="unembedding", action="store_false", help="no output layer in adapters"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="the engine's options as JSON, with its name")
    parser.add_argument("--backend", type=json.loads, default={}, help="the backend's options as JSON")
    asked = parser.parse_args()
    name = asked.engine.get("name", "sglang")
    own = SGLANG if name == "sglang" and asked.device == "cuda" else {}
    rank = {} if name == "local" else {"max_adapter_rank": asked.rank}
    asked.engine = {"name": name, "max_adapters": 2 * asked.adapters, **rank, **own, **asked.engine}
    checkpointing = {"gradient_checkpointing": True} if asked.device == "cuda" else {}
    asked.backend = {"name": "fsdp", **checkpointing, **asked.backend}
    # What write_model makes the longest sequence of.
    asked.prompt_tokens, written = max(asked.tokens, PROMPT_TOKENS), asked.new_tokens
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_model(folder / "model", argparse.Namespace(**{**vars(asked), "new_tokens": written}))
        (folder / "run.toml").write_text(run_file(asked, folder))
        log("starting")
        with open_session(folder / "run.toml", overrides={**NOT_USED, **FORCED}) as session:
            log("started")
            found = measure(session, asked, folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
