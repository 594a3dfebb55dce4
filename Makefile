# Every target does its own set-up; the logic is in scripts/.
.PHONY: help setup test test-all demo lint clean
.DEFAULT_GOAL := help

help: ## print this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | while IFS='|' read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

setup: ## system packages, virtual environment, C extensions; takes no time when nothing changed
	@scripts/setup.sh

demo: setup ## break a small training job on a real Slurm cluster made on this machine, and watch it recover
	@scripts/demo.sh

test: setup ## lint, types and the quick tests
	@scripts/test.sh "not slow"

test-all: setup ## what `make test` leaves out: every repeat and long run (PART=1/4: one of four parts)
	@scripts/test_all.sh $(PART)

lint: setup ## ruff, mypy and the rules of the house alone
	@scripts/lint.sh

clean: ## remove what set-up, tests and the demo made here (system packages stay)
	@scripts/clean.sh
