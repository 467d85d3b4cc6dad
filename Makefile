# One word for each habit; `make help` lists them. Nothing is needed but python3, make and a C/C++ compiler.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
CORES := $(shell nproc 2>/dev/null || echo 2)
# For `make serve`, `make test` and the like: flags that are handed on.
ARGS ?=

# llama.cpp is compiled when llama-cpp-python is installed; by default its build uses one core.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(CORES)

ROOMS = $(patsubst lqs/%/,%,$(sort $(dir $(wildcard lqs/*/__init__.py))))
LIBRARY = $(realpath $(shell $(CC) -print-file-name=$(1)))

.PHONY: build fix lint types test cover stress asan tsan annotate bench load sdist serve check clean help model
.DEFAULT_GOAL := help

# --- Environment. A stamp is renewed when pyproject.toml changes. ---

$(VENV)/.base: pyproject.toml
	@echo "Making the environment in $(VENV). llama.cpp is compiled on the first time: about 5 minutes on 2 cores."
	@$(PYTHON) -m venv $(VENV) || { echo "python3 has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
		> $(VENV)/build-requirements.txt
	@$(PIP) install wheel -r $(VENV)/build-requirements.txt
	@touch $@

# The compiled modules are left out of the install: `build` makes them in place, and only when their sources changed.
$(VENV)/.run: $(VENV)/.base
	@echo "Installing lqs and what it needs to run."
	@LQS_EXTENSIONS=0 $(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing what the tests and checks need."
	@LQS_EXTENSIONS=0 $(PIP) install --no-build-isolation -e '.[dev]'
	@touch $@

# --- Run. ---

build: $(VENV)/.run  ## build the compiled modules in place
	@$(PY) -W ignore setup.py -q build_ext --inplace -j $(CORES)

model: build
	@$(VENV)/bin/lqs models pull > /dev/null

serve: model  ## install, fetch the default model, serve it (ARGS="--port 8081")
	@exec $(VENV)/bin/lqs serve $(ARGS)

# --- Check. ---

test: $(VENV)/.dev model  ## install and run the suite (ARGS="-k name")
	@$(PY) -m pytest $(ARGS)

stress: $(VENV)/.dev build  ## the tests in which many threads meet
	@$(PY) -m pytest -m stress $(ARGS)

fix: $(VENV)/.dev  ## mend style
	@$(PY) -m ruff check -q --fix . || true
	@$(PY) -m ruff format -q .

lint: $(VENV)/.dev  ## style and complexity
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@PATH=$(abspath $(VENV))/bin:$$PATH cython-lint $(wildcard lqs/*.pyx lqs/*.pxd lqs/*/*.pxi lqs/*/*.pxd)

types: $(VENV)/.dev build  ## mypy strict, and the stubs beside the compiled modules
	@$(PY) -m mypy
	@$(PY) -m mypy.stubtest $(patsubst lqs/%.pyi,lqs.%,$(wildcard lqs/_*.pyi)) --ignore-disjoint-bases

cover: $(VENV)/.dev model  ## branch coverage, the compiled modules traced; fails below 95 % in any room
	@$(call copy,build/cover,bench models docs Makefile CHANGELOG.md)
	@cd build/cover && LQS_COVERAGE=1 $(abspath $(PY)) -W ignore setup.py -q build_ext --inplace -j $(CORES)
	@cd build/cover && LQS_COVERAGE=1 PYTHONPATH=$(CURDIR)/build/cover $(abspath $(PY)) -m coverage run -m pytest -q -m 'not stress and not timing' $(ARGS)
	@cd build/cover && $(abspath $(PY)) -m coverage combine -q && $(abspath $(PY)) -m coverage report
	@cd build/cover && for room in $(ROOMS); do \
		$(abspath $(PY)) -m coverage report --include="lqs/$$room/*" --fail-under=95 > /dev/null \
			|| { echo "$$room: less than 95 % of its branches"; exit 1; }; \
	done
	@cd build/cover && $(abspath $(PY)) -m coverage report --include="lqs/*.pxd,lqs/*/*.pxi" --fail-under=95 > /dev/null \
		|| { echo "less than 95 % of the compiled lines"; exit 1; }

asan: $(VENV)/.dev  ## memory errors and undefined behaviour in the core
	@$(call sanitized,asan,address,$(call LIBRARY,libasan.so):$(call LIBRARY,libubsan.so):$(call LIBRARY,libstdc++.so))

tsan: $(VENV)/.dev  ## data races in the core
	@$(call sanitized,tsan,thread,$(call LIBRARY,libtsan.so))

annotate: $(VENV)/.dev  ## where Python leaks into the compiled modules
	@LQS_ANNOTATE=1 $(PY) -W ignore setup.py -q --name > /dev/null
	@ls build/annotate/cython/lqs/*.html
	@echo "Open them in a browser: no line in a nogil body may be yellow."

check: test lint types cover stress  ## all of it

# --- Measure. ---

bench: $(VENV)/.dev build  ## nanoseconds per operation of the core
	@$(PY) -m bench.core $(ARGS)

load: $(VENV)/.dev model  ## load on the whole server, beside a peer (ARGS="--model FILE --peer llama-server=PATH")
	@$(PY) -m bench.compare $(ARGS)

# --- Release. ---

sdist: $(VENV)/.dev  ## sdist -> wheel -> empty environment
	@rm -rf dist build/wheel
	@$(PY) -W ignore setup.py -q sdist
	@LQS_NATIVE=0 $(PIP) wheel --no-build-isolation --no-deps -w dist dist/*.tar.gz
	@! unzip -l dist/*.whl | grep -E '\.(c|cpp|h|pyx|pxd|pxi)$$' || { echo "sources in the wheel"; exit 1; }
	@$(PYTHON) -m venv build/wheel && build/wheel/bin/python -m pip -q install dist/*.whl
	@cd build && wheel/bin/lqs models list && wheel/bin/python -c "import lqs.engine.library"
	@ls -sh dist

clean:  ## remove what was built; the environment and the models stay
	@rm -rf build dist *.egg-info lqs/*.so lqs/_core.c lqs/_engine.cpp .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find lqs tests -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# copy FOLDER, more: the sources and tests in a folder of their own, so that a special build does not touch this one.
# Times are kept and what was built there stays, so a second run compiles only what changed.
define copy
rm -rf $(1)/lqs $(1)/tests && mkdir -p $(1) && \
tar -cf - --exclude=__pycache__ --exclude='*.so' lqs tests setup.py pyproject.toml README.md $(wildcard $(2)) | tar -xf - -C $(1)
endef

# sanitized FOLDER, kind, libraries to load first: the core's tests on a build of the core alone.
define sanitized
$(call copy,build/$(1)) && rm -f build/$(1)/lqs/_engine.pyx && cd build/$(1) && \
LQS_SANITIZE=$(2) $(abspath $(PY)) -W ignore setup.py -q build_ext --inplace && \
LD_PRELOAD=$(3) PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/build/$(1) \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
setarch -R $(abspath $(PY)) -m pytest -s -q $(ARGS) tests/core
endef
