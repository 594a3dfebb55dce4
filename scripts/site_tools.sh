#!/bin/sh
# What the files for sites are tried with, which no Debian package of this machine brings; `make test-all` calls it:
#   .setup/environment-modules   Environment Modules, unpacked, since their package cannot be installed beside Lmod
#   .venv-easybuild              EasyBuild
#   .setup/apptainer             a root of Debian sid with Apptainer (root only)
# What cannot be had is left out with one line; its tests are then skipped and say so.
set -u
cd "$(dirname "$0")/.."
. scripts/logged.sh
mkdir -p .setup

modules() {
    rm -rf .setup/package && mkdir .setup/package && (cd .setup/package && apt-get -q download environment-modules) &&
        dpkg-deb -x .setup/package/*.deb .setup/environment-modules
}
[ -d .setup/environment-modules ] || ! command -v apt-get >/dev/null ||
    logged apt "fetching Environment Modules" modules || say "they cannot be had here; their test is skipped"

easybuild() {
    .venv/bin/python -m venv --clear .venv-easybuild &&
        .venv-easybuild/bin/python -m pip install --disable-pip-version-check --no-input easybuild==5.4.1 pycodestyle
}
[ -e .venv-easybuild/bin/eb ] || logged python "installing EasyBuild" easybuild || {
    rm -rf .venv-easybuild
    say "EasyBuild cannot be had here; its tests are skipped"
}

apptainer() {
    root=.setup/apptainer.building
    rm -rf "$root"
    mirror=$(.venv/bin/python -c 'from resilio_hpc.devtools.devcluster import image; print(image.host_mirror())') &&
        debootstrap --variant=minbase --include=ca-certificates,squashfs-tools,uidmap sid "$root" "$mirror" || return 1
    cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y --no-install-recommends apptainer python3-venv || return 1
    # users of a namespace of the test's own, and no more capabilities than this machine's root has
    echo root:1:65535 | tee "$root/etc/subuid" >"$root/etc/subgid"
    sed -i 's/^root default capabilities = .*/root default capabilities = no/' "$root/etc/apptainer/apptainer.conf" &&
        mv "$root" .setup/apptainer
}
[ -d .setup/apptainer ] || [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null ||
    logged apt "making a root with Apptainer (a minute or two)" apptainer || {
    rm -rf .setup/apptainer.building
    say "Apptainer cannot be had here; its test is skipped"
}
