# What people type: `make demo` and `make test`. `make help` lists everything.
# Nothing has to be installed by hand first but make itself; see bootstrap/system-packages.sh for what `setup` installs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Python 3.11 or newer that makes the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package as a user has it: built as a wheel, installed in an environment of its own.
INSTALLED := build/installed

# Tools that start others (ansible-lint starts ansible-playbook) find those of this environment first.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A terminal's or a caller's Python settings must not reach into the environments that are made here.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

SOURCES := $(shell find bootstrap playbooks roles -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# --- environment ---------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.installed ## Install system packages that are missing, and the pinned Python environment

.PHONY: system-packages
system-packages:
	@bash bootstrap/system-packages.sh

$(VENV)/.installed: requirements.lock pyproject.toml | system-packages
	@echo "setup: Python environment $(VENV) from requirements.lock"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"setup: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; name another: make PYTHON=python3.12 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: $(VENV)/.installed ## Write requirements.lock anew from pyproject.toml, with the newest versions
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --extra lab --group dev --group docs pyproject.toml --output-file requirements.lock >/dev/null

# --- checks --------------------------------------------------------------------------------------------------------

.PHONY: check lint types unit site
check: lint types unit site ## The fast part: linters, types, unit tests, links of the site; needs no lab

lint: $(VENV)/.installed
	ruff check .
	ruff format --check .
	yamllint --strict .
	ansible-lint --offline

types: $(VENV)/.installed
	mypy
	mypy docs molecule tests

# Two at once on each processor: many of these tests only wait.
unit: $(VENV)/.installed
	pytest --numprocesses $$((2 * $$(nproc))) tests/unit

site: $(VENV)/.installed ## Build the documentation as a site in build/site; fails for a broken link
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

.PHONY: format
format: $(VENV)/.installed ## Let ruff put the Python files into their form
	ruff check --fix .
	ruff format .

# --- tests ---------------------------------------------------------------------------------------------------------

# The repairs of test-repair mostly wait: the roles' machines have the processors meanwhile. Two labs at once would only
# take them from each other. Which part comes last is printed first, and a wrong PART ends it here.
.PHONY: test
test: ## What CI runs: checks, the package, roles, and one part of test-machines in turn (PART=NAME: that one)
	@$(PYTHON) -m tests.machines.parts $(PART) >/dev/null
	$(MAKE) --jobs 2 --output-sync=line --no-print-directory check test-package test-trust
	$(MAKE) --jobs 2 --no-print-directory test-repair test-molecule
	$(MAKE) --no-print-directory test-part

# Dependencies come in the locked versions, so that a test says something about this tree and not about the day.
$(INSTALLED)/.installed: $(SOURCES) README.md LICENSE pyproject.toml requirements.lock | $(VENV)/.installed
	rm -rf $(INSTALLED) build/wheel
	mkdir -p build
	python -m build --wheel --no-isolation --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	sed -n 's/^\([a-zA-Z0-9._-]*==[^ ]*\( ; [^\\]*\)\{0,1\}\).*/\1/p' requirements.lock >build/constraints.txt
	$(PYTHON) -m venv $(INSTALLED)
	wheel=$$(echo build/wheel/*.whl) && $(INSTALLED)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint build/constraints.txt "$$wheel[lab]"
	touch $@

.PHONY: wheel
wheel: $(INSTALLED)/.installed ## Build the wheel, in build/wheel

.PHONY: test-package
test-package: $(INSTALLED)/.installed ## The wheel, built and installed in a clean environment
	GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes pytest tests/package

.PHONY: test-trust
test-trust: $(VENV)/.installed ## Every playbook and command with machines whose every string is an attack
	pytest --numprocesses $$((2 * $$(nproc))) tests/trust

# The lab makes network namespaces and virtual machines: that part runs as root, the rest as whoever calls make.
comma := ,
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo --preserve-env=HOME$(comma)XDG_CACHE_HOME$(comma)GPUNODES_CAPTURE$(comma)GPUNODES_KEEP_LAB env PATH=$$PATH)

MACHINES := $(AS_ROOT) GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes $(CURDIR)/$(BIN)/pytest -x -p no:cacheprovider

.PHONY: test-repair
test-repair: $(INSTALLED)/.installed ## Repairs of a thousand nodes on a real API server, without machines
	$(MACHINES) tests/repair

.PHONY: test-part
test-part: $(INSTALLED)/.installed ## One part of test-machines: PART=NAME, or the one whose turn it is
	files=$$($(PYTHON) -m tests.machines.parts $(PART)) && { [ -z "$$files" ] || $(MACHINES) $$files; }

.PHONY: test-machines
test-machines: $(INSTALLED)/.installed ## All parts, one after another; hours without KVM
	$(MACHINES) tests/machines

.PHONY: test-slow
test-slow: $(INSTALLED)/.installed ## NVIDIA's real driver, built on a virtual machine; more than an hour without KVM
	$(MACHINES) tests/slow

.PHONY: test-molecule
test-molecule: $(VENV)/.installed ## Roles on virtual machines: check mode, converge, second run, verification, reset
	$(AS_ROOT) rm -rf $(CURDIR)/build/molecule
	$(AS_ROOT) MOLECULE_EPHEMERAL_DIRECTORY=$(CURDIR)/build/molecule $(CURDIR)/$(BIN)/molecule test --no-command-borders

.PHONY: demo
demo: setup ## A cluster on virtual machines of this machine's own, left for you to try
	bash bootstrap/demo.sh

.PHONY: bench
bench: $(INSTALLED)/.installed ## Measure on machines of the lab; prints a table of ratios
	$(AS_ROOT) GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes $(CURDIR)/$(BIN)/python -m tests.bench

.PHONY: docs
docs: $(VENV)/.installed ## Generate the command and settings reference
	python docs/generate.py

.PHONY: clean
clean: ## Remove what the targets above made, the environment included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .ansible
