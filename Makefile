# Two commands for a fresh machine: `make demo` (installs, then shows DART beside plain decoding) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: demo test core lint clean

core:  ## build the C++ core into src/ for work on the sources (PYTHONPATH=src)
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/dev
	cp build/dev/_core*.so build/dev/_core.pyi src/dartspec/
