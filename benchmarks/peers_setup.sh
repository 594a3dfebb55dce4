#!/bin/sh
# Install what we are measured against, launchers and checkpointers, into .venv-peers, by name, from the package index
# that pip is set to.
# A peer that cannot be had is left out with one line; the benchmarks then skip it and say so.
set -u
cd "$(dirname "$0")/.."
. scripts/logged.sh
mkdir -p .setup

pip() { .venv-peers/bin/python -m pip "$@" --disable-pip-version-check --no-input -c constraints.txt; }

# peer "NAME==VERSION" dependency…   (--no-deps, since their own requirements could pull in another torch)
peer() {
    wanted=$1
    shift
    if logged peers "installing $wanted" pip install --no-deps "$wanted" && logged peers "  and what it needs" pip install "$@"; then
        return 0
    fi
    say "$wanted cannot be had here; the benchmarks skip it"
}

scripts/setup.sh || exit 1
inputs=$(cat constraints.txt benchmarks/peers_setup.sh | sha256sum | cut -d ' ' -f 1)
[ "$(cat .setup/peers.stamp 2>/dev/null)" != "$inputs" ] || exit 0
logged peers "making .venv-peers" "$(scripts/find_python.sh)" -m venv --clear .venv-peers || exit 1
logged peers "installing torch" pip install "$(grep '^torch==' constraints.txt)" numpy rich setuptools || exit 1
peer nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py packaging psutil pynvml pyyaml
peer torchft==0.2.0 opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
peer dlrover==0.6.1 psutil pynvml deprecated requests packaging grpcio tornado protobuf kubernetes
peer torchsnapshot==0.1.0 aiofiles aiohttp importlib-metadata nest_asyncio psutil pyyaml typing_extensions
echo "$inputs" >.setup/peers.stamp
