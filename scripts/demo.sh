#!/bin/sh
# The demo: a small training job on a Slurm cluster made on this machine, or on localhost where that cannot be.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
if [ "$(id -u)" != 0 ]; then
    echo "demo: runs on localhost, since making a Slurm cluster here needs root"
elif ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null; then
    echo "demo: runs on localhost, since Slurm is not installed"
fi
exec .venv/bin/resilio demo --out demo-out "$@"
