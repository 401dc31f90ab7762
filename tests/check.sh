#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# check.sh PLAIN ASAN TSAN - run every test of the three builds and close with "N passed, N failed, N skipped".
#
# A test is a program or script that exits 0 (pass), 77 (skip, and says why) or anything else (fail). It gets
# the build folder as its argument and in $LOCKSD_BUILD, and the daemon's binary in $LOCKSD.
set -u
cd "$(dirname "$0")/.." || exit 1
plain=$1 asan=$2 tsan=$3
logs=$plain/logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0 failures=()

run() { # run NAME SECONDS COMMAND...
    local name=$1 limit=$2 log start rc
    shift 2
    log=$logs/${name//[\/ ]/-}.log
    start=$SECONDS
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null
    rc=$?
    case $rc in
    0) passed=$((passed + 1)); printf 'ok    %-44s %4d s\n' "$name" $((SECONDS - start)) ;;
    77) skipped=$((skipped + 1)); printf 'skip  %-44s %s\n' "$name" "$(tail -n 1 "$log")" ;;
    *) failed=$((failed + 1)); failures+=("$name")
       printf 'FAIL  %-44s exit %d, %s\n' "$name" "$rc" "$log"; tail -n 30 "$log" | sed 's/^/      | /' ;;
    esac
}

in_build() { # in_build BUILD LABEL SECONDS TEST...: each test, with its build's environment
    local build=$1 label=$2 limit=$3 test
    shift 3
    export LOCKSD_BUILD=$build LOCKSD=$build/locksd
    for test in "$@"; do
        [ -x "$test" ] && run "$label $(basename "$test")" "$limit" "$test" "$build"
    done
}

export CK_DEFAULT_TIMEOUT=120 CK_TIMEOUT_MULTIPLIER=1
export LOCKSD_KILLS=1000
in_build "$plain" plain 300 "$plain"/tests/unit/test_* "$plain"/tests/model/test_* "$plain"/tests/fault/test_* tests/fault/test_*.sh tests/packaging/test_*.sh
LOCKSD_TEST_DTYPE=bf16 in_build "$plain" 'plain bf16' 300 "$plain"/tests/unit/test_lease "$plain"/tests/model/test_sequences
in_build "$plain" cuda 300 "$plain"/cuda/test_*
run 'oracle' 600 tests/tools/check-oracle.sh "$plain" quick

export LOCKSD_KILLS=100 CK_TIMEOUT_MULTIPLIER=4
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
in_build "$asan" 'asan+ubsan' 400 "$asan"/tests/unit/test_* "$asan"/tests/fault/test_*

export TSAN_OPTIONS=halt_on_error=1
in_build "$tsan" tsan 400 "$tsan"/tests/unit/test_ring "$tsan"/tests/unit/test_engine "$tsan"/tests/unit/test_intake

[ ${#failures[@]} -eq 0 ] || printf 'failed: %s\n' "${failures[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
