#!/bin/sh
# Lint, then the tests that EXPRESSION of marks selects (pytest -m), in two processes: what needs the dev cluster mostly
# waits. A lint that failed fails the whole all the same.
set -u
cd "$(dirname "$0")/.."
also=${1:+ and ($1)}
status=0
scripts/lint.sh || status=1
[ "$status" = 0 ] || echo "lint failed (see above); the tests run all the same"
export RESILIO_TEST_SLURM="${RESILIO_TEST_SLURM-26.05}"  # the root of a newer Slurm may be built
run() { .venv/bin/python -m pytest --durations=10 --durations-min=1 -m "$1$also"; }
on_cluster=$(mktemp)
run slurm >"$on_cluster" 2>&1 &
run "not slurm" || status=1
echo "== on the dev cluster"
wait $! || status=1
cat "$on_cluster"
rm "$on_cluster"
exit $status
