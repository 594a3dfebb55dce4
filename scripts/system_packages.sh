#!/bin/sh
# Install the system packages that are missing, and start none of the services that they bring; "all": also those of
# `make test-all`.
set -eu
. scripts/logged.sh
export DEBIAN_FRONTEND=noninteractive
PATH=$PATH:/usr/sbin:/sbin

# Each row: a command (or a file) that proves the row is there, then the packages that bring it.
required='gcc gcc libc6-dev'
wanted='slurmctld slurmctld slurm-wlm-basic-plugins
slurmd slurmd
sbatch slurm-client
munged munge
ip iproute2
unshare util-linux
ps procps
debootstrap debootstrap
bindfs bindfs
mpiexec openmpi-bin
chromium chromium
promtool prometheus
/usr/include/rdma/fi_rma.h libfabric-dev
/usr/lib/*/pmix2/lib/libpmix.so libpmix-dev'
[ "${1-}" != all ] || wanted="$wanted
radosgw radosgw ceph-mon ceph-osd ceph-common
mandoc mandoc
groff groff
fish fish
zsh zsh
ruby ruby
/usr/share/lmod lmod"

missing_packages() {
    echo "$1" | while read -r command packages; do
        # shellcheck disable=SC2086  # a file's name may hold a pattern
        command -v "$command" >/dev/null || ls $command >/dev/null 2>&1 || printf '%s ' "$packages"
    done
}

# The interpreter's own headers and ensurepip; a pyenv or conda Python has both.
python_packages() {
    scripts/find_python.sh >/dev/null 2>&1 || printf 'python3 python3-venv python3-dev '
}

# Debian starts a service as soon as it is installed, unless this file says no (policy-rc.d, exit code 101).
policy=/usr/sbin/policy-rc.d
forbid_services() {
    trap restore_services EXIT
    trap 'exit 130' INT TERM
    [ ! -e $policy ] || mv $policy $policy.resilio-saved
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
}
restore_services() {
    rm -f $policy
    [ ! -e $policy.resilio-saved ] || mv $policy.resilio-saved $policy
}

apt() { apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"; }

# Only what the package lists know: Ubuntu without "universe" has no Slurm, and the rest should still be installed.
known() {
    for package in "$@"; do
        if [ -n "$(apt-cache madison "$package" 2>/dev/null)" ]; then
            printf '%s ' "$package"
        else
            say "no package $package in this machine's apt sources; what needs it is skipped" >&2
        fi
    done
}

need="$(python_packages)$(missing_packages "$required")"
want=$(missing_packages "$wanted")
[ -n "$need$want" ] || exit 0

if ! command -v apt-get >/dev/null; then
    say "no apt here, so these stay missing: $need$want(without Slurm its tests are skipped and the demo runs on localhost)"
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    say "not root, so these stay missing: $need$want(without Slurm its tests are skipped and the demo runs on localhost)"
    exit 0
fi
forbid_services
logged apt "reading the package lists" apt update || say "going on with the package lists as they are"
# shellcheck disable=SC2086  # the lists are words
[ -z "$need" ] || logged apt "installing $need" apt install --no-install-recommends $need
want=$(known $want)
[ -z "$want" ] || logged apt "installing $want" apt install --no-install-recommends $want ||
    say "going on without them: Slurm tests are skipped and the demo runs on localhost"
