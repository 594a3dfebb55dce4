#!/bin/sh
# Slurm's HealthCheckProgram: slurmd starts it every HealthCheckInterval, also before it has registered, without PATH,
# and kills it after 60 s. It returns at once: where "resilio health watch" runs, the verdict is fresh and nothing is to
# be done; where not, one run of the checks is started, and not waited for. A run that hangs is named and left.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
DIR=/run/resilio/health
FRESH_S=240
LONGEST_S=300
PYTHON=/usr/bin/python3
PACKAGE=
SITE=
PROC=/proc
set -u
export PATH LC_ALL
umask 022
cd / || exit 0 # python searches the working directory first: none that a job chose
read -r up rest <"$PROC/uptime" || exit 0
now=${up%%.*}

# root's own directory, and no link to another
ours() {
    [ ! -h "$DIR" ] && [ -d "$DIR" ] && [ -O "$DIR" ]
}

say() {
    echo "resilio health check: $1" >&2
    ours && { echo "$now health check: $1" >>"$DIR/log"; } 2>/dev/null
}

# root's directory in memory; another user's is not used
mkdir -p "$DIR" 2>/dev/null
if ! ours; then
    say "$DIR is not root's directory: no verdict is kept"
    exit 0
fi
size=$(stat -c %s "$DIR/log" 2>/dev/null) && [ "$size" -gt 65536 ] && mv -f "$DIR/log" "$DIR/log.old"

if [ ! -e "$DIR/wanted" ] && [ -O "$DIR/verdict" ]; then
    while read -r key rest; do
        if [ "$key" = uptime ]; then
            case $rest in '' | *[!0-9]* | ??????????*) rest=0 ;; esac
            age=$((now - rest))
            [ $age -ge 0 ] && [ $age -le "$FRESH_S" ] && exit 0
        fi
    done <"$DIR/verdict"
fi

pid='' since=''
{ read -r pid since <"$DIR/run"; } 2>/dev/null
case $pid$since in '' | *[!0-9]* | ????????????????????*) pid='' ;; esac
if [ -n "$pid" ] && [ -n "$since" ] && [ -e "$PROC/$pid" ]; then
    { read -r words <"$PROC/$pid/stat"; } 2>/dev/null || words=''
    case ${words#*) } in
        Z* | '') ;;
        *)
            [ $((now - since)) -lt "$LONGEST_S" ] && exit 0
            { read -r waits <"$PROC/$pid/wchan"; } 2>/dev/null || waits=''
            state=${words#*) }
            say "the checks have run for $((now - since)) s (process $pid, state ${state%% *} $waits): is $PYTHON on a \
file system that hangs?"
            exit 0
            ;;
    esac
fi

command -v setsid >/dev/null || { say "there is no setsid (util-linux): no checks" && exit 0; }
set -- health run --write --quiet --directory "$DIR"
[ -z "$SITE" ] || set -- "$@" --site "$SITE"
# a session of its own, since slurmd kills the process group of this script when it ends
PYTHONPATH=$PACKAGE setsid "$PYTHON" -m resilio_hpc.cli.main "$@" </dev/null >/dev/null 2>>"$DIR/log" &
echo "$! $now" >"$DIR/run"
exit 0
