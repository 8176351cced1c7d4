# make demo | test | bench | quality     each does all the set-up it needs; see cmake/setup.sh for what can be overridden
# make check                   the tests that a change since main can have touched
# make test T=shard            the tests of one stem
# make device                  the tests on a CUDA device that the CPU plays; make test WITHOUT=device: the others
# make timings                 what building and testing cost, the dearest first
# make cuda                    the CUDA sources for one architecture, and what is tested of them without a device
# make device-session          on a machine with an NVIDIA device: tests, sanitizer, budgets, benchmarks and a profile
# TORCH_VERSION=2.11.0         another torch, in a build folder of its own
# REEF_PYTHON=python3          an interpreter that already has torch
# REEF_CUDA=1                  the CUDA parts, too, on a machine without an NVIDIA driver; 0: never
# UNITY=OFF                    each source by itself: all of it later, one of them sooner
# JOBS=2                       compilations at a time (each takes 1 to 2 GB)
SHELL := /bin/bash
JOBS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 1 : n)))
BUILD ?= build$(if $(TORCH_VERSION),-$(TORCH_VERSION))
PRESET ?= default
UNITY ?= ON
# CUDA sources take longer than all others: without a driver nobody could run them.
DRIVER := $(wildcard /proc/driver/nvidia/version /dev/dxg)
WITH_CUDA := $(if $(filter 1,$(REEF_CUDA)),-DREEF_WITH_CUDA=ON,$(if $(filter-out 0,$(REEF_CUDA))$(DRIVER),-UREEF_WITH_CUDA,-DREEF_WITH_CUDA=OFF))
PYTHON = .venv/bin/python
CMAKE = .venv/bin/cmake
CTEST = .venv/bin/ctest
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# A precompiled header is found by ccache's hash only if time stamps do not count.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime

.PHONY: demo test device check bench quality build configure setup cuda device-session sanitize timings format tidy clean help
help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | head -12

setup:
	@cmake/setup.sh

configure: setup
	@mkdir -p $(BUILD)
	@$(CMAKE) --preset $(PRESET) -B $(BUILD) -DREEF_PYTHON="$$(readlink -f .venv)/bin/python" -DREEF_UNITY=$(UNITY) $(WITH_CUDA) \
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

TESTS = $(PYTHON) tests/run.py $(BUILD) --jobs $(JOBS)
test: configure
	@$(TESTS) $(if $(T),--stem $(T)) $(if $(WITHOUT),--without $(WITHOUT))

device: configure
	@$(TESTS) --label device $(if $(T),--stem $(T))

check: configure
	@$(TESTS) --since $(or $(SINCE),main) $(if $(T),--stem $(T))

# The unit tests once more under AddressSanitizer and UndefinedBehaviorSanitizer (CPU, no Python).
sanitize:
	@$(MAKE) --no-print-directory configure PRESET=sanitize BUILD=$(BUILD)-sanitize
	@$(CMAKE) --build $(BUILD)-sanitize --parallel $(JOBS) --target unit_tests
	@$(CTEST) --test-dir $(BUILD)-sanitize --parallel $$((2 * $(JOBS))) --output-on-failure --no-tests=error -L unit

# In the same build folder: all that is not CUDA is there already.
cuda: export TORCH_CUDA_ARCH_LIST ?= 9.0+PTX
cuda:
	@$(MAKE) --no-print-directory configure REEF_CUDA=1
	@$(CMAKE) --build $(BUILD) --parallel $(JOBS) --target reef_package
	@cd tests && PYTHONPATH=$(abspath $(BUILD))/python REEF_BUILD_DIR=$(abspath $(BUILD)) $(CURDIR)/$(PYTHON) -m pytest -q -p no:cacheprovider \
	  python/test_doctor.py python/test_optim_cuda.py policy/test_surface.py device/test_kernel_resources.py

# On a machine with an NVIDIA device: half an hour, in the order of what it tells; writes rows of benchmarks/RESULTS.md.
device-session: build
	@$(PYTHON) tests/device_session.py $(BUILD)

timings:
	@$(or $(wildcard $(PYTHON)),python3) cmake/timings.py $(BUILD)

bench: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/run.py --build $(BUILD) --results benchmarks/RESULTS.md

quality: build
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/optim_quality.py --build $(BUILD) --results benchmarks/QUALITY.md
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/local_updates_quality.py --results benchmarks/QUALITY.md
	@PYTHONPATH=$(BUILD)/python $(PYTHON) benchmarks/compress_quality.py --results benchmarks/QUALITY.md

SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
format:
	clang-format -i $(SOURCES)

tidy:
	@$(MAKE) --no-print-directory configure PRESET=tidy BUILD=$(BUILD)-tidy
	run-clang-tidy -quiet -extra-arg=-Wno-unknown-warning-option -j $(JOBS) -p $(BUILD)-tidy \
	  '$(CURDIR)/(csrc|torch_ext|examples|benchmarks)/.*\.cpp'

clean:
	rm -rf build build-* .venv
