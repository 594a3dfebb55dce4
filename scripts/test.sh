#!/bin/sh
# Lint, then the tests with the arguments given. pytest comes last, so that its summary is the last thing seen;
# a lint that failed fails the whole all the same.
set -u
cd "$(dirname "$0")/.."
status=0
scripts/lint.sh || status=1
[ "$status" = 0 ] || echo "lint failed (see above); the tests run all the same"
export RESILIO_TEST_SLURM="${RESILIO_TEST_SLURM-26.05}"  # the root of a newer Slurm may be built
.venv/bin/python -m pytest --durations=10 --durations-min=1 "$@" || status=1
exit $status
