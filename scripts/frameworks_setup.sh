#!/bin/sh
# .venv-frameworks: the frameworks that resilio_hpc.frameworks adapts to, by name, from the package index that pip is set
# to. `make test-all` calls it. The environment lies on top of .venv, so torch is not installed again, and other tests see
# nothing of it. What cannot be had is left out with one line; its tests are then skipped and say so.
set -u
cd "$(dirname "$0")/.."
. scripts/logged.sh

pip() { .venv/bin/python -m pip --python .venv-frameworks/bin/python "$@" --disable-pip-version-check --no-input -c "$constraints"; }

# framework STAMP PACKAGE==VERSION…
framework() {
    stamp=.setup/framework-$1.stamp
    shift
    [ "$(cat "$stamp" 2>/dev/null)" != "$base $*" ] || return 0
    logged frameworks "installing $*" pip install "$@" || say "$* cannot be had here; its tests are skipped"
    echo "$base $*" >"$stamp"
}

constraints=constraints.txt
base=$(echo "$PWD" | cat - constraints.txt | sha256sum | cut -d ' ' -f 1)
if [ "$(cat .venv-frameworks/base 2>/dev/null)" != "$base" ]; then
    logged frameworks "making .venv-frameworks" .venv/bin/python -m venv --without-pip --clear .venv-frameworks || exit 0
    packages=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
    own=$(.venv-frameworks/bin/python -c 'import site; print(site.getsitepackages()[0])')
    echo "import site; site.addsitedir('$packages')" >"$own/base.pth"
    echo "$base" >.venv-frameworks/base
    rm -f .setup/framework-*.stamp
fi
framework lightning lightning==2.6.6
framework transformers transformers==5.24.0 accelerate==1.15.0
framework torchdata torchdata==0.11.0
framework ignite pytorch-ignite==0.5.5
framework hydra hydra-core==1.3.8 hydra-submitit-launcher==1.2.0
framework megatron megatron-core==0.16.1
# torchtitan's datasets refuses our fsspec
grep -v '^fsspec=' constraints.txt >.setup/constraints-torchtitan.txt
constraints=.setup/constraints-torchtitan.txt
framework torchtitan torchtitan==0.3.0 triton==3.9.0
constraints=constraints.txt
export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$PWD/.venv-frameworks/extensions"
framework deepspeed deepspeed==0.19.8
# DeepSpeed compiles the first in the first process group, the second for its Adam in the host's memory, for a minute or
# two; ranks that are killed meanwhile leave a lock behind
if [ ! -e .venv-frameworks/extensions/built-adam ] && .venv-frameworks/bin/python -c "import deepspeed" 2>/dev/null; then
    logged frameworks "compiling DeepSpeed's operations for processors" .venv-frameworks/bin/python -c \
        "from deepspeed.comm.torch import build_shm_op; from deepspeed.ops.op_builder import CPUAdamBuilder
build_shm_op(), CPUAdamBuilder().load()" && touch .venv-frameworks/extensions/built-adam
fi
