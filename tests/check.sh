#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# check.sh PLAIN ASAN TSAN - run every test of the three builds and close with "N passed, N failed, N skipped".
#
# A test is a program or script that exits 0 (pass), 77 (skip, and says why) or anything else (fail). It gets
# the build folder as its argument and in $LOCKSD_BUILD, and the daemon's binary in $LOCKSD. Unit and model
# tests run side by side, a processor each; those of fault/ and packaging/ look at time and processes, and have
# the machine to themselves, but for the emulated kernels, which take what these leave idle.
# The limits of time catch a hang: a machine with other work may take many times as long as one without.
set -u
cd "$(dirname "$0")/.." || exit 1
plain=$1 asan=$2 tsan=$3
logs=$plain/logs
rm -rf "$logs"
mkdir -p "$logs"

run() { # run NAME SECONDS COMMAND...: a line, and a file that says how it ended
    local name=$1 limit=$2 log start=$SECONDS rc
    shift 2
    log=$logs/${name//[\/ ]/-}.log
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null
    rc=$?
    case $rc in
    0) echo "$name" >"$log.passed"; printf 'ok    %-44s %4d s\n' "$name" $((SECONDS - start)) ;;
    77) echo "$name" >"$log.skipped"; printf 'skip  %-44s %s\n' "$name" "$(tail -n 1 "$log")" ;;
    *) echo "$name" >"$log.failed"
       printf 'FAIL  %-44s exit %d, %s\n%s\n' "$name" "$rc" "$log" "$(tail -n 30 "$log" | sed 's/^/      | /')" ;;
    esac
}

longest_first() { # the long ones begin, so that none is left alone at the end
    printf '%s\n' "$@" | grep -E '/test_(rows|intake|score)$'
    printf '%s\n' "$@" | grep -vE '/test_(rows|intake|score)$'
}

in_build() { # in_build BUILD LABEL SECONDS SIDE_BY_SIDE TEST...: each test, with its build's environment
    local build=$1 label=$2 limit=$3 many=$4 test started=()
    shift 4
    export LOCKSD_BUILD=$build LOCKSD=$build/locksd
    for test in $(longest_first "$@"); do
        [ -x "$test" ] || continue
        while [ "$(jobs -rp | wc -l)" -ge "$many" ]; do wait -n; done
        run "$label $(basename "$test")" "$limit" "$test" "$build" &
        started+=($!)
    done
    [ ${#started[@]} -eq 0 ] || wait "${started[@]}" # alone it would wait for the emulated ones, too
}

emulated() { # emulated TEST ARCH PROCESSORS SEED [KIB]: the CUDA kernels on the host; threads take turns in order or, with a seed, at random; KIB: shared memory of a block
    LK_EMULATED_ARCH=$2 LK_EMULATED_PROCESSORS=$3 LK_EMULATED_SEED=$4 LK_EMULATED_SHARED=${5:-} \
        run "emulated sm_${2%0} x $3${5:+ $5 KiB} test_$1" 3600 "$plain/emulated/test_$1" --small
}

all_emulated() { # when nothing else wants the processor, so that tests beside it have the machine to themselves still
    chrt --idle --pid 0 "$BASHPID" 2>/dev/null
    emulated step 800 2 7 99
    local together
    for together in 1 4 16; do # of those that wait all give up, some, none
        LK_EMULATED_PROCESSORS=16 LK_EMULATED_TOGETHER=$together LK_EMULATED_SEED=7 \
            run "emulated $together at once test_step" 3600 "$plain/emulated/test_step" --merged
    done
    emulated step 900 2 7
    emulated build 900 132 ''
    emulated build 800 132 7 99
    run 'emulated oracle' 3600 tests/tools/check-oracle.sh "$plain" emulated
}

ended() { # ended HOW: the names of the tests that did
    find "$logs" -name "*.$1" -exec cat {} + | sort
}

cores=$(nproc)
export CK_DEFAULT_TIMEOUT=120 CK_TIMEOUT_MULTIPLIER=3
export LOCKSD_KILLS=1000
in_build "$plain" plain 1200 "$cores" "$plain"/tests/unit/test_* "$plain"/tests/model/test_*
exec {emulated}< <(all_emulated) # is none of this shell's jobs
in_build "$plain" plain 1200 1 "$plain"/tests/fault/test_* tests/fault/test_*.sh tests/packaging/test_*.sh
LOCKSD_TEST_DTYPE=bf16 in_build "$plain" 'plain bf16' 1200 "$cores" "$plain"/tests/unit/test_lease "$plain"/tests/model/test_sequences
in_build "$plain" cuda 1200 1 "$plain"/cuda/test_*
run 'oracle' 3600 tests/tools/check-oracle.sh "$plain" quick

export LOCKSD_KILLS=100 CK_TIMEOUT_MULTIPLIER=10
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
in_build "$asan" 'asan+ubsan' 1800 "$cores" "$asan"/tests/unit/test_*
in_build "$asan" 'asan+ubsan' 1800 1 "$asan"/tests/fault/test_*

export TSAN_OPTIONS=halt_on_error=1
in_build "$tsan" tsan 1800 "$cores" "$tsan"/tests/unit/test_{intake,engine,ring}

cat <&"$emulated"
ended failed | sed 's/^/failed: /'
echo "$(ended passed | wc -l) passed, $(ended failed | wc -l) failed, $(ended skipped | wc -l) skipped"
[ "$(ended failed | wc -l)" -eq 0 ]
