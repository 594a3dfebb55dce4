#!/bin/sh
# Remove what this checkout's set-up, tests, benchmarks and demo made. System packages stay.
set -eu
cd "$(dirname "$0")/.."
rm -rf .setup .venv .venv-peers .venv-frameworks .venv-easybuild .venv-pyslurm build dist demo-out resilio-runs test-logs resilio_hpc.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
find native -name '*.so' -delete
find . -name __pycache__ -type d -prune -exec rm -rf {} +
