#!/bin/sh
# What `make test` leaves out, in parts whose results add up in tests/test_all.json: test_all.sh [K/N]; all of 1/4 to 4/4
# without a word.
set -u
cd "$(dirname "$0")/.."
export RESILIO_TEST_SLURM="${RESILIO_TEST_SLURM-all}"
# Most of these runs import torch in each of their processes, and compute more than those of `make test`.
export RESILIO_TEST_WORKERS="${RESILIO_TEST_WORKERS:-$(nproc)}"
scripts/system_packages.sh all
scripts/frameworks_setup.sh
scripts/site_tools.sh
scripts/pyslurm_setup.sh
status=0
for part in ${1:-1/4 2/4 3/4 4/4}; do
    scripts/test.sh slow --part="$part" || status=1
done
exit $status
