#!/bin/sh
# Slurm's Prolog (slurm.conf(5)): runs as root on each node of a job before it starts there. Exit code 1 drains the node
# and has the job start elsewhere; so that is done only for what a believable verdict, or a glance at /proc, says, and only
# while the node daemon, which asks the storm breaker, has given leave: else a fault that all nodes share drains them all.
#
# It reads memory only (/run, /proc, /dev): no disk, no shared file system, no Slurm command, no Python. It cannot hang.
# The verdict comes from "resilio health watch", or from the health check; see cached_verdict.py for its form.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
DIR=/run/resilio/health
TTL_S=900
MISSING=pass
MODE=enforce
LEAST_MEMORY_PERCENT=2
PROC=/proc
DEV=/dev
set -u
export PATH LC_ALL
umask 022
job=${SLURM_JOB_ID:-?}
read -r up rest <"$PROC/uptime" || up=0
now=${up%%.*}

# root's own directory, and no link to another
ours() {
    [ ! -h "$DIR" ] && [ -d "$DIR" ] && [ -O "$DIR" ]
}

say() {
    echo "resilio prolog: job $job: $1" >&2
    ours && { echo "$now prolog job $job: $1" >>"$DIR/log"; } 2>/dev/null
}

leave=0
# $1: the check, $2: what it found. Slurm drains the node for "Prolog error" then; by what is noted in "refused" the node
# daemon knows that this was ours.
refuse() {
    if [ "$MODE" = observe ]; then
        say "would fail: $2"
        return
    fi
    if [ "$leave" -le "$now" ]; then
        say "passes, without leave of the storm breaker (does resilio health watch run?): $2"
        ours && { : >"$DIR/wanted"; } 2>/dev/null
        return
    fi
    say "fails: $2"
    ours && { echo "$now $job $1 $2" >"$DIR/refused"; } 2>/dev/null
    exit 1
}

no_verdict() {
    why=$1
    ours && { : >"$DIR/wanted"; } 2>/dev/null
    if [ "$MISSING" = fail ]; then
        leave=$((now + 1)) # the site's own word; no daemon could give leave
        refuse no-verdict "$why"
    else
        say "warning: $why"
    fi
}

# Ours, of that kind (4: directory, 8: file), and not for others to write? The mode is in hexadecimal.
trusted() {
    kind=$((0x$2 >> 12))
    [ "$kind" -eq "$1" ] && [ $((0x$2 & 022)) -eq 0 ]
}

# Does the job use this GPU? Where that cannot be told, it does.
uses() {
    case ${SLURM_JOB_GPUS:-} in
        '') [ "$1" -lt 0 ] ;;
        *[!0-9,]*) true ;;
        *) [ "$1" -lt 0 ] || case ",$SLURM_JOB_GPUS," in *",$1,"*) true ;; *) false ;; esac ;;
    esac
}

action='' uptime='' boot='' gpus=0 granted=0 whole=no because='' bad=''
read_verdict() {
    modes=$(stat -c %f "$DIR" "$DIR/verdict" 2>/dev/null) || return 1
    # shellcheck disable=SC2086
    set -- $modes
    [ $# -eq 2 ] && trusted 4 "$1" && trusted 8 "$2" && [ -O "$DIR" ] && [ -O "$DIR/verdict" ] || return 2
    first=yes
    while read -r key rest; do
        if [ "$first" = yes ]; then
            [ "$key $rest" = "resilio-verdict 1" ] || return 3
            first=no
        fi
        case $key in
            boot) boot=$rest ;;
            uptime) uptime=$rest ;;
            gpus) gpus=$rest ;;
            action) action=$rest ;;
            leave) granted=$rest ;;
            because) because=${because:-$rest} ;;
            evict)
                index=${rest%% *}
                case $index in -1) ;; '' | *[!0-9]* | ???????*) return 3 ;; esac
                if [ -z "$bad" ] && uses "$index"; then bad=$rest; fi
                ;;
            end) whole=yes ;;
        esac
    done <"$DIR/verdict"
    [ "$whole" = yes ] || return 3
    case $action in none | warn | evict | fail | drain) ;; *) return 3 ;; esac
    for number in "$uptime" "$gpus" "$granted"; do
        case $number in '' | *[!0-9]* | ??????????*) return 3 ;; esac
    done
    return 0
}

read_verdict 2>/dev/null
case $? in
    0)
        read -r this_boot <"$PROC/sys/kernel/random/boot_id" || this_boot=$boot
        age=$((now - uptime))
        if [ "$boot" != "$this_boot" ]; then
            no_verdict "the verdict is from before the node was started"
        elif [ $age -gt "$TTL_S" ] || [ $age -lt -1 ]; then
            no_verdict "the verdict is $age s old"
        else
            leave=$granted
            case $action in
                drain | fail)
                    check=${because#* }
                    refuse "${check%%: *}" "${because:-the verdict says $action}"
                    ;;
                evict | warn)
                    check=${bad#* * }
                    [ -z "$bad" ] || refuse "${check%%: *}" "evict $bad"
                    ;;
            esac
        fi
        ;;
    1) no_verdict "there is no verdict yet" ;;
    2) no_verdict "the verdict in $DIR is not root's alone, and is not believed" ;;
    *)
        gpus=0
        no_verdict "the verdict in $DIR is damaged"
        ;;
esac

# What may have changed since.
total=0 available=''
while read -r key value unit; do
    case $key in
        MemTotal:) total=$value ;;
        MemAvailable:) available=$value && break ;;
    esac
done <"$PROC/meminfo"
if [ -n "$available" ] && [ "$total" -gt 0 ] && [ $((available * 100 / total)) -lt "$LEAST_MEMORY_PERCENT" ]; then
    refuse memory-free "only $((available / 1024)) MiB of memory are available"
fi
case $gpus in '' | *[!0-9]*) gpus=0 ;; esac
if [ "$gpus" -gt 0 ]; then
    set -- "$DEV"/nvidia[0-9]*
    [ -e "$1" ] || shift
    [ $# -ge "$gpus" ] || refuse gpu-count "$# of $gpus GPU devices are in $DEV"
fi
exit 0
