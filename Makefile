# make demo | test | bench | quality     each does all the set-up it needs; see cmake/setup.sh for what can be overridden
# TORCH_VERSION=2.11.0         another torch, in a build folder of its own
# REEF_PYTHON=python3          an interpreter that already has torch
# JOBS=2                       compilations at a time (each takes 1 to 2 GB)
SHELL := /bin/bash
JOBS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 1 : n)))
BUILD ?= build$(if $(TORCH_VERSION),-$(TORCH_VERSION))
PRESET ?= default
PYTHON = .venv/bin/python
CMAKE = .venv/bin/cmake
CTEST = .venv/bin/ctest
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# A precompiled header is found by ccache's hash only if time stamps do not count.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime

.PHONY: demo test bench quality build configure setup sanitize format tidy clean help
help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | head -4

setup:
	@cmake/setup.sh

configure: setup
	@mkdir -p $(BUILD)
	@$(CMAKE) --preset $(PRESET) -B $(BUILD) -DREEF_PYTHON="$$(readlink -f .venv)/bin/python" \
	  $$(command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache) \
	  >$(BUILD)/configure.log 2>&1 || { cat $(BUILD)/configure.log; exit 1; }
	@grep -- '-- Reef' $(BUILD)/configure.log

build: configure
	@$(CMAKE) --build $(BUILD) --parallel $(JOBS)

demo: configure
	@$(CMAKE) --build $(BUILD) --parallel $(JOBS) --target bytelm
	@echo "demo: a byte-level GPT on the source text of the Python standard library: at its natural peak, in a quarter of it, with 8-bit optimizer states, and where memory is short; some minutes"
	@REEF_PYTHON="$(PYTHON)" $(PYTHON) examples/demo.py $(BUILD)/examples/bytelm \
	  --steps 600 --threads $$(n=$$(nproc); echo $$((n > 4 ? 4 : n))) $(DEMO_ARGS)

test: build
	@$(CTEST) --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure --no-tests=error

# The unit tests once more under AddressSanitizer and UndefinedBehaviorSanitizer (CPU, no Python).
sanitize:
	@$(MAKE) --no-print-directory configure PRESET=sanitize BUILD=$(BUILD)-sanitize
	@$(CMAKE) --build $(BUILD)-sanitize --parallel $(JOBS) --target unit_tests
	@$(CTEST) --test-dir $(BUILD)-sanitize --parallel $(JOBS) --output-on-failure --no-tests=error -L unit

bench: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/run.py --build $(BUILD) --results benchmarks/RESULTS.md

quality: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/optim_quality.py --build $(BUILD) --results benchmarks/QUALITY.md

SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
format:
	clang-format -i $(SOURCES)

tidy:
	@$(MAKE) --no-print-directory configure PRESET=tidy BUILD=$(BUILD)-tidy
	run-clang-tidy -quiet -extra-arg=-Wno-unknown-warning-option -j $(JOBS) -p $(BUILD)-tidy \
	  '$(CURDIR)/(csrc|torch_ext|examples|benchmarks)/.*\.cpp'

clean:
	rm -rf build build-* .venv
