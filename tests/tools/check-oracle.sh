#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# check-oracle.sh BUILD [quick|full|device|emulated|emulated-full] - locks-replay against the float64 reference, which recomputes
# every choice of pages.
#
# quick: the shipped trace, one axis at a time around the default, on each path of kernels this machine has; then synthetic
# traces (traces.py). full: the cross of scan, budget, sampled, mass, page tokens and rank on the shipped trace, and the
# synthetic ones at every scan. A run is a replay with --out and the reference's --check of it; one line each, and
# "N passed, N failed" at the end. device: what quick runs, but for traces of 32 bits, on the GPU. emulated: the CUDA kernels
# on the host (tests/cuda/replay.cu), some of that; emulated-full: all of it, on fewer steps. The reference lies in
# $LOCKSD_ORACLE, else ../shared/oracle; without it: exit 77. $LOCKSD_PYTHON has numpy (/usr/bin/python3).
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:?usage: check-oracle.sh BUILD [quick|full|device|emulated|emulated-full]} mode=${2:-quick}
reference=${LOCKSD_ORACLE:-../shared/oracle}/locksd_ref.py
python=${LOCKSD_PYTHON:-/usr/bin/python3}
shipped=tests/data/smollm2-needle.safetensors

[ -r "$reference" ] || { echo "no reference at $reference (set LOCKSD_ORACLE to its folder)"; exit 77; }
"$python" -c 'import numpy' 2>/dev/null || { echo "$python has no numpy (python3-numpy)"; exit 77; }
for tool in locks-replay locksd; do
    [ -x "$build/$tool" ] || { echo "no $tool in $build"; exit 1; }
done
work=$(mktemp -d /tmp/locksd-oracle.XXXXXX)
trap 'rm -rf "$work"' EXIT
build=$(realpath "$build") limit=300
export build reference python work limit

# A daemon on a chosen path of kernels, for $LOCKSD.
for path in portable avx2 avx512; do
    printf '#!/bin/sh\nexec "%s/locksd" "$@" --set daemon.device=cpu --set daemon.cpu_path=%s\n' "$build" "$path" >"$work/locksd-$path"
    chmod +x "$work/locksd-$path"
done
printf '#!/bin/sh\nexec "%s/locksd" "$@" --set daemon.device=cpu\n' "$build" >"$work/locksd-auto"
printf '#!/bin/sh\nexec "%s/locksd" "$@" --set daemon.device=cuda\n' "$build" >"$work/locksd-cuda"
export LK_EMULATED_PROCESSORS=${LK_EMULATED_PROCESSORS:-8} LK_REPLAY_STEPS
chmod +x "$work/locksd-auto" "$work/locksd-cuda"

one() { # one "PATH STEPS TRACE OPTION...": a line, and a file that says how it ended
    # shellcheck disable=SC2086 # words are meant to split
    set -- $1
    local path=$1 steps=$2 trace=$3 log out start replay=$build/locks-replay
    shift 3
    [ "$path" = emulated ] && replay=$build/emulated/replay LK_REPLAY_STEPS=$steps
    log=$(mktemp "$work/log.XXXXXX")
    out=$log.safetensors
    start=$(date +%s%N)
    if LOCKSD=$work/locksd-$path timeout "$limit" "$replay" --trace "$trace" "$@" --out "$out" >"$log" 2>&1 &&
        timeout 600 "$python" "$reference" "$trace" "$@" --steps "$steps" --check "$out" >>"$log" 2>&1 &&
        [ "$(tail -n 1 "$log")" = ok ]; then
        printf 'ok    '; : >"$log.passed"
    else
        printf 'FAIL  '; : >"$log.failed"
    fi
    printf '%-9s %-22s %-52s %4d ms\n' "$path" "$(basename "$trace" .safetensors)" "$*" \
        $((($(date +%s%N) - start) / 1000000))
    [ -e "$log.passed" ] || sed 's/^/      | /' "$log"
    rm -f "$out"
}
export -f one

around_default() {
    local budget mass
    for budget in 64 256 512 1024; do echo "auto 8 $shipped --budget $budget"; done
    for scan in coarse nested tree; do
        for budget in 64 256 512; do echo "auto 8 $shipped --scan $scan --budget $budget"; done
    done
    for sampled in 0 16; do echo "auto 8 $shipped --sampled $sampled"; done
    echo "auto 8 $shipped --sampled 16 --budget 256" # more than the sink and the newest page leave room for
    echo "auto 8 $shipped --budget 2048"             # half of it sampled by default
    echo "auto 8 $shipped --budget 2048 --scan tree"
    for mass in 0.8 0.9 0.99; do
        for budget in 1024 4096; do echo "auto 8 $shipped --mass $mass --budget $budget"; done
    done
    for tokens in 8 32 64; do echo "auto 8 $shipped --page-tokens $tokens"; done
    for rank in 2 4 16; do echo "auto 8 $shipped --rank $rank"; done
    echo "portable 8 $shipped --scan tree --sampled 8"
    grep -qw avx2 /proc/cpuinfo && echo "avx2 8 $shipped --scan tree --sampled 8"
    grep -qw avx512_vnni /proc/cpuinfo && echo "avx512 8 $shipped --scan tree --sampled 8"
}

synthetic() { # synthetic OPTIONS...: each with every trace
    local name options budget
    "$python" tests/tools/traces.py "$work" || exit 1
    for name in $("$python" tests/tools/traces.py --list); do
        budget=256
        [ "$name" = long ] && budget=2048
        for options in "$@"; do
            echo "auto 8 $work/$name.safetensors --budget $budget --scan $options"
        done
    done
}

cross() {
    local scan budget sampled mass tokens rank
    for scan in full coarse nested tree; do for budget in 64 256 512 1024; do for tokens in 8 16 32 64; do
        for rank in 2 4 8; do for sampled in '' '--sampled 0' '--sampled 16'; do
            for mass in '' '--mass 0.8' '--mass 0.9' '--mass 0.99'; do
                echo "auto 32 $shipped --scan $scan --budget $budget --page-tokens $tokens --rank $rank $sampled $mass"
            done
        done; done
    done; done; done
}

on_gpu() { # on_gpu PATH STEPS: a list, without traces of 32 bits; of the shipped trace each so many-th step
    grep ^auto | grep -v f32 | sed "s|^auto 8 $shipped|$1 $2 $shipped|; s|^auto|$1|"
}

some_emulated() {
    local name options
    for options in '--scan tree --sampled 8' '--budget 1024 --mass 0.9'; do
        echo "emulated 64 $shipped $options"
    done
    "$python" tests/tools/traces.py "$work" || exit 1
    for name in outlier peaked-bf16 denormal-d80; do
        echo "emulated 8 $work/$name.safetensors --budget 64"
        echo "emulated 8 $work/$name.safetensors --budget 256 --scan tree --sampled 8"
    done
}

case $mode in
quick) { around_default; synthetic full 'tree --sampled 8'; } >"$work/list" ;;
full) { around_default; cross; synthetic full coarse nested tree 'tree --sampled 8'; } >"$work/list" ;;
device) { around_default; synthetic full coarse nested tree 'tree --sampled 8'; } | on_gpu cuda 8 >"$work/list" ;;
emulated) some_emulated >"$work/list" limit=3000 ;;
emulated-full) { around_default; synthetic full coarse nested tree 'tree --sampled 8'; } | on_gpu emulated 64 >"$work/list" limit=3000 ;;
*) echo "check-oracle.sh: '$mode' is none of quick, full, device, emulated and emulated-full"; exit 64 ;;
esac
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 # a run a processor, not all processors for each
# shellcheck disable=SC2016 # the inner shell expands
# A line is printed by one write: two at a time do not mix.
xargs -d '\n' -P "$(nproc)" -I{} bash -c 'out=$(one "$1"); printf "%s\n" "$out"' _ {} <"$work/list"

passed=$(find "$work" -name '*.passed' | wc -l)
failed=$(($(wc -l <"$work/list") - passed))
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
