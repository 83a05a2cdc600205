# Everything runs in .venv, which is made on first use: any target works in a fresh clone.

PYTHONS := python3.13 python3.12 python3.11 python3
BIN := .venv/bin
STAMP := .venv/installed

# Of `make load`: the load that it makes, and where.
DEVICE := auto
USERS := 24
DURATION := 60

.PHONY: demo test lint test-gpu load bench clean .venv

demo: $(STAMP)
	$(BIN)/matmuld demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

load: $(STAMP)
	$(BIN)/python -m tests.load --device $(DEVICE) --users $(USERS) --seconds $(DURATION)

bench: $(STAMP)
	$(BIN)/matmuld bench http

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find clients service tests -name __pycache__ -prune -exec rm -rf {} +

.venv: $(STAMP)

$(STAMP): pyproject.toml clients/python/pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(find_python); set -x; $$python -m venv --clear .venv; }
	@$(find_extra); set -x; $(BIN)/python -m pip install -e ./clients/python -e ".[$$extra]"
	@touch $@

define find_python
for python in $(PYTHONS) ''; do \
  $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
done; \
if [ -z "$$python" ]; then \
  echo 'Python 3.11 or newer with its venv module is needed; on Debian and Ubuntu:' >&2; \
  echo '  apt-get install -y python3-venv' >&2; \
  exit 1; \
fi
endef

# CUDA only where a GPU is, and CUDA 13 only on a driver that can run it.
define find_extra
extra=dev; \
if driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null \
    | grep -m 1 -o '^[0-9][0-9]*'); then \
  if [ "$$driver" -ge 580 ]; then extra=dev-cuda13; else extra=dev-cuda12; fi; \
fi
endef
