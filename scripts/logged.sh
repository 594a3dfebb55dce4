# Sourced by the set-up scripts: quiet commands, whose output goes to a log and is shown only when they fail.

# Perl and apt complain at length about a locale that is named but not generated; this one is always there.
export LC_ALL=C.UTF-8 LANG=C.UTF-8

say() { echo "setup: $*"; }

# logged NAME "what is being done" command…
logged() {
    log=.setup/$1.log
    say "$2 (log: $log)"
    started=$(date +%s)
    shift 2
    printf '\n$ %s\n' "$*" >>"$log"
    if "$@" >>"$log" 2>&1 </dev/null; then
        echo "took $(($(date +%s) - started)) s" >>"$log"
    else
        say "failed; the last lines of $log:" >&2
        tail -n 15 "$log" >&2
        return 1
    fi
}
