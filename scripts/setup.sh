#!/bin/sh
# Everything that `make demo` and `make test` need, on a bare Debian or Ubuntu machine. Run it as often as you like.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .setup
# Two makes at once would fight over apt and over .venv; the lock is released when this process ends.
if command -v flock >/dev/null; then
    exec 9>.setup/lock
    flock -n 9 || { echo "setup: waiting for another set-up of this checkout"; flock 9; }
fi
scripts/system_packages.sh
scripts/python_packages.sh
