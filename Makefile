# make train: set up and train SDAR on HalfCheetah (ARGS="…" adds options).  make demo: set up and film a trained agent.
# make test: set up and run the tests.
# make test-gpu: what only a machine with a GPU can test.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

# A run that shows learning within minutes on a laptop. Options in ARGS come later and win; a task of your own
# (--env-id) is trained with the script's defaults instead.
LAPTOP := --env-id HalfCheetah-v4 --total-timesteps 50000 --hidden-dim 128 --batch-size 128 --eval-every 5000

# These networks gain little from threads, and lose much where other programs want the cores too.
export OMP_NUM_THREADS ?= 1

.PHONY: train demo test test-gpu
train: $(READY)
	$(VENV)/bin/python sdar_continuous_action.py $(if $(findstring --env-id,$(ARGS)),,$(LAPTOP)) $(ARGS)

demo: $(READY)
	$(VENV)/bin/python evaluate.py docs/agents/lander.pt --video demo.gif --overwrite $(ARGS)
	@echo "Now open demo.gif: dark is act, light is repeat"

test: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/shellcheck benchmark.sh tests/start_slurm.sh .ci/run
	$(VENV)/bin/python -m pytest $(ARGS)

test-gpu: $(READY)
	$(VENV)/bin/python speed.py doctor
	$(VENV)/bin/python -m pytest tests/test_cuda.py -n 0 -rs $(ARGS)

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than Python 3.10; try make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --requirement requirements.txt
	@touch $@
