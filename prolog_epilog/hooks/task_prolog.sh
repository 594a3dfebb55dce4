#!/bin/sh
# Slurm's TaskProlog: runs as the user before each task; lines "export NAME=value" on its output become the task's
# environment. It tells the task which devices of the node are not to be used (RESILIO_EVICTED_DEVICES: GPU UUIDs, HCAs).
PATH=/usr/sbin:/usr/bin:/sbin:/bin
DIR=/run/resilio/health
set -u
export PATH
devices=''
if [ "$(stat -c %u "$DIR" "$DIR/verdict" 2>/dev/null | tr '\n' ' ')" = "0 0 " ]; then
    while read -r key index device rest; do
        [ "$key" = evict ] && devices=${devices:+$devices,}$device
    done <"$DIR/verdict"
fi
case $devices in *[!A-Za-z0-9_,./:-]*) devices='' ;; esac
[ -z "$devices" ] || echo "export RESILIO_EVICTED_DEVICES=$devices"
exit 0
