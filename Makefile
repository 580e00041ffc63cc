# Main targets: `make demo` and `make test`. `make help` lists all targets.
# Only make has to be installed by hand; bootstrap/system-packages.sh has the packages that `setup` installs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Python 3.11 or newer, which creates the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package as users install it: built as a wheel, installed in a separate environment.
INSTALLED := build/installed

# Tools that run other tools (ansible-lint runs ansible-playbook) use those of this environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The caller's Python settings must not affect the environments that are created here. All archives have fixed times.
# Without its compiled files Python compiles this tree again in each process of Ansible, of which the tests start thousands.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV SOURCE_DATE_EPOCH PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX

SOURCES := $(shell find bootstrap playbooks roles docs -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# --- environment ---------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.installed ## Install missing system packages, and the pinned Python environment

.PHONY: system-packages
system-packages:
	@bash bootstrap/system-packages.sh

# The tests that need these packages are skipped without them; nothing else needs them.
.PHONY: test-tools
test-tools: ## Install the Debian packages that only tests need: Chromium, promtool, zsh; `make test` does
	@bash bootstrap/system-packages.sh tests

$(VENV)/.installed: requirements.lock pyproject.toml | system-packages
	@echo "setup: Python environment $(VENV) from requirements.lock"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"setup: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; choose another: make PYTHON=python3.12 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: $(VENV)/.installed ## Rewrite requirements.lock from pyproject.toml, with the newest versions
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --extra lab --extra autoscale --extra kubeconfig --group dev --group docs pyproject.toml --output-file requirements.lock >/dev/null

# --- checks --------------------------------------------------------------------------------------------------------

# Linters, types and the site use one processor each for most of their time, the unit tests all: those begin at once, and
# the others run beside them.
CHECKS := unit lint types site

.PHONY: check $(CHECKS)
check: $(VENV)/.installed ## The fast part: linters, types, unit tests, links of the site; needs no lab
	@$(MAKE) --jobs 2 --output-sync=line --no-print-directory $(CHECKS)

lint: $(VENV)/.installed
	ruff check .
	ruff format --check .
	yamllint --strict .
	bash bootstrap/ansible-lint.sh

types: $(VENV)/.installed
	mypy
	mypy docs molecule tests

# Two processes per processor: many of these tests only wait.
unit: $(VENV)/.installed
	pytest --numprocesses $$((2 * $$(nproc))) -m 'not long' tests/unit

site: $(VENV)/.installed ## Build the documentation as a site in build/site; fails for a broken link
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

.PHONY: format
format: $(VENV)/.installed ## Format the Python files with ruff
	ruff check --fix .
	ruff format .

# --- tests ---------------------------------------------------------------------------------------------------------

# The first command prints the part that runs last, and fails for an unknown PART. The part has the processors for itself.
.PHONY: test
test: ## All that CI runs: checks, package, and one part of test-machines in turn (or PART=NAME)
	@$(PYTHON) -m tests.machines.parts $(PART) >/dev/null
	$(MAKE) --no-print-directory test-tools
	$(MAKE) --jobs 2 --output-sync=line --no-print-directory $(CHECKS) test-package test-long test-trust test-repair
	$(MAKE) --no-print-directory test-part

# Dependencies have the locked versions, so that results depend on this tree only.
$(INSTALLED)/.installed: $(SOURCES) README.md LICENSE pyproject.toml hatch_build.py requirements.lock build/man/gpunodes.1
	rm -rf $(INSTALLED) build/wheel
	mkdir -p build
	python -m build --wheel --no-isolation --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	sed -n 's/^\([a-zA-Z0-9._-]*==[^ ]*\( ; [^\\]*\)\{0,1\}\).*/\1/p' requirements.lock >build/constraints.txt
	$(PYTHON) -m venv $(INSTALLED)
	wheel=$$(echo build/wheel/*.whl) && $(INSTALLED)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint build/constraints.txt "$$wheel[lab,kubeconfig]"
	touch $@

.PHONY: wheel
wheel: $(INSTALLED)/.installed ## Build the wheel, in build/wheel

.PHONY: collection
collection: build/.collection ## Build the Ansible collection, in build

build/.collection: $(SOURCES) CHANGELOG.md LICENSE | $(VENV)/.installed
	mkdir -p build
	rm -f build/gpunodes-bootstrap-*.tar.gz
	python bootstrap/collection.py build
	touch $@

# kubectl of the image: a URL or a file instead of its publisher, or `none`; its checksum, if it is another version than that
# of bootstrap/kubectl.toml.
KUBECTL ?=
KUBECTL_SHA256 ?=
IMAGE := build/.image
# The last line of what built an image without it.
SAY_KUBECTL = @test -s build/kubectl || echo 'The image has no kubectl; KUBECTL=URL or KUBECTL=FILE adds it (docs/install.md).'

# Always run: it tries again, and changes the file only if its content changes.
.PHONY: try-kubectl
build/kubectl: try-kubectl | $(VENV)/.installed
	@mkdir -p build
	@python bootstrap/kubectl.py $@ --from '$(KUBECTL)' --sha256 '$(KUBECTL_SHA256)'

# Debian's packages in build/image-packages stay until `make clean`: then the newest are downloaded.
.PHONY: image
image: $(IMAGE) ## Build the container image as an OCI archive, in build; KUBECTL=URL or FILE or none, KUBECTL_SHA256=HEX
	$(SAY_KUBECTL)

$(IMAGE): $(INSTALLED)/.installed build/kubectl
	rm -f build/gpunodes-image-*
	python bootstrap/image.py build/wheel/*.whl build build/kubectl
	touch $@

.PHONY: dist
dist: dist/SHA256SUMS ## All that a release consists of, with checksums, in dist
	$(SAY_KUBECTL)

dist/SHA256SUMS: $(INSTALLED)/.installed build/.collection $(IMAGE)
	rm -rf dist build/sdist
	python -m build --sdist --no-isolation --outdir build/sdist . >build/sdist.log 2>&1 || { cat build/sdist.log; exit 1; }
	python bootstrap/dist.py dist $(INSTALLED)/bin/gpunodes build/wheel/*.whl build/sdist/*.tar.gz \
	  build/gpunodes-bootstrap-*.tar.gz build/gpunodes-image-*

# The collection in an environment that has Ansible and nothing else of gpunodes.
ANSIBLE := build/ansible
$(ANSIBLE)/.installed: $(INSTALLED)/.installed build/.collection
	rm -rf $(ANSIBLE)
	$(PYTHON) -m venv $(ANSIBLE)
	$(ANSIBLE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint build/constraints.txt ansible-core
	ANSIBLE_COLLECTIONS_PATH=$(ANSIBLE)/collections $(ANSIBLE)/bin/ansible-galaxy collection install --offline --force \
	  --collections-path $(ANSIBLE)/collections build/gpunodes-bootstrap-*.tar.gz >build/collection.log 2>&1 || { cat build/collection.log; exit 1; }
	touch $@

.PHONY: test-package
test-package: $(ANSIBLE)/.installed dist ## All files of dist: wheel and collection, each in a clean environment, the image, ...
	GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes pytest tests/package

# On the controller ansible-core 2.19 supports these.
PYTHONS ?= 3.11 3.12 3.13

.PHONY: test-pythons
test-pythons: $(INSTALLED)/.installed ## The installed wheel with each of PYTHONS, and 3.14, that is installed
	for version in $(PYTHONS) 3.14; do \
	  if ! python$$version --version; then echo "test-pythons: python$$version is not installed: skipped"; continue; fi; \
	  rm -rf build/python-$$version; \
	  python$$version -m venv build/python-$$version; \
	  build/python-$$version/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint build/constraints.txt build/wheel/*.whl; \
	  GPUNODES=$(CURDIR)/build/python-$$version/bin/gpunodes pytest tests/package/test_installed.py; \
	done

.PHONY: test-sanity
test-sanity: collection ## ansible-test sanity on the built collection, for each of PYTHONS that is installed
	rm -rf build/sanity
	ANSIBLE_COLLECTIONS_PATH=build/sanity ansible-galaxy collection install --offline --force \
	  --collections-path build/sanity build/gpunodes-bootstrap-*.tar.gz >build/sanity.log
	cd build/sanity/ansible_collections/gpunodes/bootstrap && git init --quiet && echo tests/output >.git/info/exclude && \
	for version in $(PYTHONS); do \
	  if python$$version --version; then ansible-test sanity --color no --venv --python $$version; fi; done

.PHONY: test-long
test-long: $(VENV)/.installed ## The unit tests that `make check` leaves out: with Ansible, sshd or a browser, or of a whole table
	pytest --numprocesses $$((2 * $$(nproc))) -m long tests/unit

.PHONY: test-trust
test-trust: $(VENV)/.installed ## Every playbook and command with machines that report an attack in every string
	pytest --numprocesses $$((2 * $$(nproc))) tests/trust

# The lab creates network namespaces and virtual machines: its tests run as root, all others as the calling user.
comma := ,
AS_ROOT := $(if $(filter-out 0,$(shell id -u)),sudo --preserve-env=HOME$(comma)XDG_CACHE_HOME$(comma)GPUNODES_CAPTURE$(comma)GPUNODES_KEEP_LAB$(comma)GPUNODES_BUILD_PROGRAMS$(comma)GPUNODES_JUPYTER env PATH=$$PATH)

MACHINES := $(AS_ROOT) GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes $(CURDIR)/$(BIN)/pytest -x -p no:cacheprovider

# Outside of a git checkout Molecule does not find its base configuration by itself.
MOLECULE := $(AS_ROOT) rm -rf $(CURDIR)/build/molecule && \
  $(AS_ROOT) MOLECULE_EPHEMERAL_DIRECTORY=$(CURDIR)/build/molecule $(CURDIR)/$(BIN)/molecule \
  --base-config .config/molecule/config.yml test --no-command-borders

.PHONY: test-repair
test-repair: $(INSTALLED)/.installed ## Repairs of a thousand nodes with a real API server, without machines
	$(MACHINES) --numprocesses 3 --dist loadfile tests/repair

.PHONY: test-part
test-part: $(ANSIBLE)/.installed ## One part of test-machines: PART=NAME, or the part in turn
	paths=$$($(PYTHON) -m tests.machines.parts $(PART)); case "$$paths" in \
	  "") ;; \
	  molecule/*) $(MOLECULE) $${paths//molecule\//--scenario-name } ;; \
	  *) $(MACHINES) $$paths ;; \
	esac

.PHONY: test-machines
test-machines: $(ANSIBLE)/.installed ## All parts in sequence; takes hours without KVM
	$(MACHINES) tests/machines
	$(MAKE) --no-print-directory test-part PART=roles
	$(MAKE) --no-print-directory test-part PART=prepared

.PHONY: test-slow
test-slow: $(INSTALLED)/.installed ## Build of NVIDIA's real driver on a virtual machine; takes more than an hour without KVM
	$(MACHINES) tests/slow

# Scenarios of molecule/. They run one after another on the same machines.
SCENARIO ?= default

.PHONY: test-molecule
test-molecule: $(VENV)/.installed ## Roles on virtual machines: check mode, converge, second run, verification, reset; SCENARIO=NAMES
	$(MOLECULE) $(SCENARIO:%=--scenario-name %)

.PHONY: demo
demo: setup ## Create a cluster on virtual machines of this host, to try gpunodes
	bash bootstrap/demo.sh

.PHONY: bench
bench: $(INSTALLED)/.installed ## Run the benchmarks on machines of the lab; prints a table
	$(AS_ROOT) GPUNODES=$(CURDIR)/$(INSTALLED)/bin/gpunodes $(CURDIR)/$(BIN)/python -m tests.bench

.PHONY: man
man: build/man/gpunodes.1 ## Build the manual pages in build/man; the wheel contains them

build/man/gpunodes.1: $(SOURCES) docs/generate.py pyproject.toml | $(VENV)/.installed
	rm -rf build/man
	python docs/generate.py --man build/man

.PHONY: docs
docs: $(VENV)/.installed ## Generate the reference of commands, settings and roles
	python docs/generate.py

.PHONY: clean
clean: ## Remove all files that these targets create, the environment included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .ansible
