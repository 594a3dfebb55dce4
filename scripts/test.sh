#!/bin/sh
# Lint, and the tests that EXPRESSION of marks selects (pytest -m), side by side; further words go to pytest.
# The lint runs the tests of the house's rules, so pytest leaves them out.
# Tests on Slurm wait more than they compute, so there are more workers than processors (RESILIO_TEST_WORKERS).
set -u
cd "$(dirname "$0")/.."
expression=$1
shift
unset PYTHONDONTWRITEBYTECODE # every process of every test would compile its modules anew
export RESILIO_TEST_SLURM="${RESILIO_TEST_SLURM-newest}" # the root of a newer Slurm may be built
lint=$(mktemp)
scripts/lint.sh >"$lint" 2>&1 &
# In a fresh checkout each worker would rewrite the asserts of all test modules; one does it, beside the lint.
[ -e tests/__pycache__ ] || .venv/bin/python -m pytest -q --collect-only >/dev/null 2>&1 || true
status=0
.venv/bin/python -m pytest -q -n "${RESILIO_TEST_WORKERS:-$(($(nproc) + 2))}" --durations=5 --durations-min=1 \
    --record-durations -m "$expression" $(sed 's/^/--ignore=/' scripts/house_rules) "$@" || status=1
wait $! || status=1
echo "== lint"
cat "$lint"
rm "$lint"
exit $status
