#!/bin/sh
# .setup/environment-modules: Environment Modules, unpacked, since Debian's package cannot be installed beside Lmod.
# `make test-all` calls it.
set -u
cd "$(dirname "$0")/.."
. scripts/logged.sh
mkdir -p .setup
[ ! -d .setup/environment-modules ] && command -v apt-get >/dev/null || exit 0

fetched() {
    rm -rf .setup/package && mkdir .setup/package && (cd .setup/package && apt-get -q download environment-modules) &&
        dpkg-deb -x .setup/package/*.deb .setup/environment-modules
}
logged apt "fetching Environment Modules" fetched || say "they cannot be had here; their test is skipped"
