#!/bin/sh
# .venv with the pinned packages of constraints.txt and this project, installed editable with its C extensions built.
set -eu
. scripts/logged.sh

stamp() { printf '%s\n' "$PWD" "$python" | cat - "$@" | sha256sum | cut -d ' ' -f 1; }
unchanged() { [ "$(cat ".setup/$1.stamp" 2>/dev/null)" = "$2" ]; }
remove_builds() { rm -f native/*.so; } # an older one, under another name, would be imported first
pip() { .venv/bin/python -m pip "$@" --disable-pip-version-check --no-input -c constraints.txt; }

# The environment knows which interpreter it was made from; look for one only where there is no working environment.
python=$(.venv/bin/python -c 'import sys; print(sys._base_executable, sys.version)' 2>/dev/null) || {
    interpreter=$(scripts/find_python.sh)
    logged python "making .venv with $interpreter" "$interpreter" -m venv --clear .venv
    python=$(.venv/bin/python -c 'import sys; print(sys._base_executable, sys.version)')
}

packages=$(stamp constraints.txt setup.cfg scripts/python_packages.sh)
extension=$(stamp setup.py setup.cfg pyproject.toml $(find native -name '*.[ch]' | sort))
if ! unchanged packages "$packages"; then
    logged python "installing the build tools" pip install setuptools wheel
    # torch by its exact version, first and alone: met through another package, a resolver may take another build of it.
    logged python "installing torch (a large download when it is not cached)" pip install "$(grep '^torch==' constraints.txt)"
    remove_builds
    logged python "installing the other pinned packages and this checkout" \
        pip install --no-build-isolation -e '.[test]'
    echo "$packages" >.setup/packages.stamp
    echo "$extension" >.setup/extension.stamp
    say "ready"
elif ! unchanged extension "$extension"; then
    remove_builds
    logged python "building the C extensions" pip install --no-deps --no-build-isolation -e .
    echo "$extension" >.setup/extension.stamp
fi
