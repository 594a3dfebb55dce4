#!/bin/sh
# Lint, then the tests that EXPRESSION of marks selects (pytest -m). With more than two processors what needs the dev
# cluster, and mostly waits, runs beside the others. A lint that failed fails the whole all the same.
set -u
cd "$(dirname "$0")/.."
status=0
scripts/lint.sh || status=1
[ "$status" = 0 ] || echo "lint failed (see above); the tests run all the same"
export RESILIO_TEST_SLURM="${RESILIO_TEST_SLURM-26.05}"  # the root of a newer Slurm may be built
run() { .venv/bin/python -m pytest --durations=10 --durations-min=1 -m "$1"; }
if [ "$(nproc)" -le 2 ]; then
    run "${1-}" || status=1
    exit $status
fi
also=${1:+ and ($1)}
on_cluster=$(mktemp)
run "slurm$also" >"$on_cluster" 2>&1 &
run "not slurm$also" || status=1
echo "== on the dev cluster"
wait $! || status=1
cat "$on_cluster"
rm "$on_cluster"
exit $status
