#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# check-device.sh BUILD - everything that needs a GPU: kernels, then the daemon and its clients on the device.
#
# BUILD was made by `make all tests cuda` where nvcc is, build/hooks by `make O=build/hooks HOOKS=1 all`. The same test files
# as on the CPU run against a daemon whose device is cuda ($LOCKSD_TEST_DEVICE); then replays are compared with the float64
# reference, where that is. Without a GPU, or without those kernels in BUILD: says so, exit 77.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=${1:?usage: check-device.sh BUILD}
failed=0

run() { # run NAME COMMAND...: a line, and all of the output if it failed
    local name=$1 out rc start word
    shift
    start=$(date +%s%N)
    out=$("$@" 2>&1)
    rc=$?
    case $rc in 0) word=ok ;; 77) word=skip ;; *) word=FAIL ;; esac
    printf '%-6s %-28s %6d ms\n' "$word" "$name" $((($(date +%s%N) - start) / 1000000))
    if [ $rc = 77 ]; then
        echo "$out" | tail -n 1 | sed 's/^/      | /'
    elif [ $rc != 0 ]; then
        failed=$((failed + 1))
        echo "$out" | tail -n 25 | sed 's/^/      | /'
    fi
}

no() { echo "check-device.sh: $*"; exit 77; }
[ -x "$build/locksd" ] || { echo "check-device.sh: there is no build in $build: make all tests cuda"; exit 1; }
[ -x "$build/cuda/test_build" ] || no "$build was built without CUDA: make all tests cuda, where nvcc of CUDA 13 or later is"
"$build/cuda/test_build" >/dev/null 2>&1
[ $? != 77 ] || no "there is no GPU here"
for test in test_build test_step test_graph; do run "cuda/$test" "$build/cuda/$test"; done
LOCKSD=$build/locksd run "cuda/test_client" "$build/cuda/test_client"
export LOCKSD_TEST_DEVICE=cuda
export LOCKSD_HOOKS=${LOCKSD_HOOKS:-build/hooks/locksd}
for test in unit/test_intake unit/test_sequence unit/test_lease model/test_sequences model/test_tables fault/test_kill fault/test_hostile fault/test_device; do
    [ -x "$build/tests/$test" ] && run "$test" "$build/tests/$test"
done
run oracle tests/tools/check-oracle.sh "$build" device
[ $failed = 0 ] || { echo "$failed failed"; exit 1; }
