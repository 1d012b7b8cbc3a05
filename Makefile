# make demo: the story in a minute and a half. make test: the tests. Both make .venv and install first.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= outputs

.PHONY: demo test lint bench clean

demo: .venv/installed
	@echo "== One update in micro-batches is the full batch's update"
	@$(BIN)/fullbatch prove --out $(OUT)
	@echo; echo "== A loop that forgets the division (exit code 1: not equal)"
	@$(BIN)/fullbatch prove --break missing-division --out $(OUT); test $$? -eq 1
	@echo; echo "== What it costs: the accumulation curve"
	@$(BIN)/fullbatch sweep --micro-batch 4 --accum-grid 1,2,4,8,16 --num-steps 25 --seed 0 --lr 0.05 --out $(OUT)
	@echo; echo "== A short run on real text, effective batch 64 in micro-batches of 16"
	@$(BIN)/fullbatch train --effective-batch 64 --micro-batch 16 --updates 15 --warmup-samples 256 --eval-every 5 --out $(OUT)
	@$(BIN)/fullbatch recipe --out $(OUT) > /dev/null
	@echo; echo "== Out of memory with one batch, not with micro-batches: on the CPU, on a device of a predicted size"
	@$(BIN)/python examples/memory_limit.py
	@echo; echo "The files:"; ls $(OUT) | sed 's|^|  $(OUT)/|'

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Figures of docs/benchmarks.md; the other trainers are extras.
bench: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	$(BIN)/python benchmarks/overhead.py --json docs/overhead.json

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
