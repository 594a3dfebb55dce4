#!/bin/sh
# Print the first Python >= 3.11 that can make virtual environments and compile extensions.
set -eu
found=
for name in python3 python3.11 python3.12 python3.13 python3.14; do
    python=$(command -v "$name") || continue
    version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) || continue
    found="$found $version"
    "$python" - 2>/dev/null <<'END' || continue
import pathlib, sys, sysconfig
assert sys.version_info >= (3, 11)
import ensurepip, venv
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
END
    echo "$python"
    exit 0
done
echo "setup: needs Python 3.11 or newer with its venv module and headers; found:${found:- none}" \
    "(Debian and Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev)" >&2
exit 1
