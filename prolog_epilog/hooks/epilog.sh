#!/bin/sh
# Slurm's Epilog: runs as root on each node of a job when it has ended there. What the job left is removed by
# "resilio health epilog" in a child with a time limit; whatever happens to it, the exit code is 0: a node is drained for
# what checks find, not for an epilog that was slow ("Epilog error").
PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
DIR=/run/resilio/health
BUDGET_S=20
PYTHON=/usr/bin/python3
PACKAGE=
SITE=
PROC=/proc
set -u
export PATH LC_ALL
cd / || exit 0 # python searches the working directory first: none that a job chose
job=${SLURM_JOB_ID:-?}
read -r up rest <"$PROC/uptime" || up=0

# root's own directory, and no link to another
ours() {
    [ ! -h "$DIR" ] && [ -d "$DIR" ] && [ -O "$DIR" ]
}

say() {
    echo "resilio epilog: job $job: $1" >&2
    ours && { echo "${up%%.*} epilog job $job: $1" >>"$DIR/log"; } 2>/dev/null
}

set -- health epilog --directory "$DIR"
[ -z "$SITE" ] || set -- "$@" --site "$SITE"
log=/dev/null
ours && [ ! -h "$DIR/log" ] && log=$DIR/log
PYTHONPATH=$PACKAGE "$PYTHON" -m resilio_hpc.cli.main "$@" </dev/null >>"$log" 2>&1 &
child=$!
waited=0 ended=no
while [ "$waited" -lt $((BUDGET_S * 10)) ]; do
    words=''
    { read -r words <"$PROC/$child/stat"; } 2>/dev/null
    # a child that ended is a zombie until it is waited for
    case ${words##*) } in '' | Z*) ended=yes && break ;; esac
    sleep 0.1
    waited=$((waited + 1))
done
if [ "$ended" = yes ]; then
    wait "$child" || say "ended with code $?"
else
    kill -KILL "$child"
    say "not ended after $BUDGET_S s, killed: is $PYTHON or what the job left on a file system that hangs?"
fi
# the next verdict is to be about the node as it is now
ours && { : >"$DIR/wanted"; } 2>/dev/null
exit 0
