#!/bin/sh
# Every lint runs even when another failed, so that one run shows all there is to mend. They run side by side, and mypy
# looks only at what has changed since it ran last.
set -u
cd "$(dirname "$0")/.."
said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
check() {
    name=$1
    shift
    .venv/bin/python "$@" >"$said/$name" 2>&1 || echo failed >"$said/$name.failed"
}
check check -m ruff check --quiet . &
check format -m ruff format --check --quiet . &
check types -m mypy &
check durations scripts/slow_tests.py &
# shellcheck disable=SC2046 # a list of words
check structure -m pytest -q --no-header --tb=short $(cat scripts/house_rules) &
wait
for name in check format types durations structure; do
    [ "$name" != structure ] || [ -e "$said/$name.failed" ] || continue # pytest says how many passed
    [ ! -s "$said/$name" ] || cat "$said/$name"
done
set -- "$said"/*.failed
if [ -e "$1" ]; then
    for name; do echo "lint failed: $(basename "$name" .failed)"; done
    exit 1
fi
echo "lint: nothing to mend"
