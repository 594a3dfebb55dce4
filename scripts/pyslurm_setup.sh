#!/bin/sh
# .venv-pyslurm: pyslurm, built for the newest Slurm of the dev cluster (docs/devcluster.md). `make test-all` calls it.
# What cannot be had is left out with one line; its tests are then skipped and say so.
set -u
cd "$(dirname "$0")/.."
. scripts/logged.sh
version=25.11.2
here=$PWD/.venv-pyslurm
mkdir -p .setup
stamp=$(cat scripts/pyslurm_setup.sh constraints.txt | sha256sum | cut -d ' ' -f 1)
[ "$(cat "$here/stamp" 2>/dev/null)" != "$PWD $stamp" ] || exit 0
[ "$(id -u)" = 0 ] || { say "pyslurm is built from the dev cluster's Slurm, which needs root; its tests are skipped"; exit 0; }

root=$(.venv/bin/python -c 'from resilio_hpc.devtools.devcluster import image, spec; print(image.ensure(spec.NEWEST_SERIES))') ||
    { say "there is no newer Slurm here, so no pyslurm; its tests are skipped"; exit 0; }

built() {
    rm -rf "$here"
    .venv/bin/python -m venv --without-pip "$here" && mkdir "$here/headers" "$here/library" || return 1
    # the headers of that Slurm, whose version reads as that of the pyslurm; its library
    chroot "$root" sh -c 'cd /var/tmp && rm -f libslurm-dev_*.deb && { apt-get -q download libslurm-dev || { apt-get -q update && apt-get -q download libslurm-dev; }; }' || return 1
    dpkg-deb -x "$root"/var/tmp/libslurm-dev_*.deb "$here/package" || return 1
    cp -r "$here/package/usr/include/slurm" "$here/headers/" || return 1
    sed -i 's/^#define SLURM_VERSION_NUMBER.*/#define SLURM_VERSION_NUMBER 0x190b00/' "$here/headers/slurm/slurm_version.h"
    cp "$root"/usr/lib/*/slurm-wlm/libslurmfull.so "$here/library/" && ln -s libslurmfull.so "$here/library/libslurm.so" || return 1
    SLURM_INCLUDE_DIR=$here/headers SLURM_LIB_DIR=$here/library LDFLAGS=-Wl,--allow-shlib-undefined \
        CFLAGS="-O0 -DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=0" \
        .venv/bin/python -m pip --python "$here/bin/python" install --no-binary pyslurm --no-cache-dir \
        --disable-pip-version-check --no-input "pyslurm==$version" || return 1
    echo "$PWD $stamp" >"$here/stamp"
}
logged python "building pyslurm $version for the newest Slurm (some minutes)" built || {
    rm -rf "$here"
    say "pyslurm cannot be built here; its tests are skipped"
}
