#!/usr/bin/env bash
# Runs a command again after each failure, until three in a row have saved nothing new:
#   restarts.sh CHECKPOINTS mpirun -n 4 python -m jaxpp_flax.launch --cluster train.py
# train.py has checkpoints="CHECKPOINTS" and fit(resume=True).
set -uo pipefail
checkpoints=$1
shift
newest() { # unfinished ones have other names; a bucket needs its own ls
    ls "$checkpoints" 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1
}

failures=0
while [ "$failures" -lt 3 ]; do
    before=$(newest)
    status=0
    "$@" || status=$?
    after=$(newest)
    failures=$((failures + 1))
    [ "$after" = "$before" ] || failures=0
    case "$status" in
        0 | 2 | 75 | 130) exit "$status" ;; # done; wrong options; asked to end, and saved; Ctrl-C
        143) [ "$failures" -gt 0 ] || exit 143 ;; # asked to end, and that save took too long
    esac
    echo "restarts.sh: status $status; checkpoint ${after:-none}, before ${before:-none}" >&2
done
exit 1
