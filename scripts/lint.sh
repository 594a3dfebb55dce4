#!/bin/sh
# Every lint runs even when one before it failed, so that one run shows all there is to mend.
set -u
cd "$(dirname "$0")/.."
status=0
check() {
    started=$(date +%s)
    echo "== $*"
    .venv/bin/python -m "$@" || status=1
    echo "   $(($(date +%s) - started)) s"
}
check ruff check --quiet .
check ruff format --check --quiet .
check mypy
exit $status
