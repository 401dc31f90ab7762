#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test_make.sh BUILD - what make says on a machine that has next to nothing, and check-device.sh where no GPU is.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d /tmp/locksd-make.XXXXXX)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAIL: $*"; exit 1; }

bare() { # bare TOOL...: a folder for $PATH with these alone
    rm -rf "${work:?}/bin"
    mkdir "$work/bin"
    for tool in "$@"; do ln -s "$(command -v "$tool")" "$work/bin/$tool"; done
}

bare make sh awk sed nproc find
PATH=$work/bin make help CUDA= >"$work/said" 2>"$work/stderr" || fail "make help: $(cat "$work/stderr")"
[ ! -s "$work/stderr" ] || fail "make help says on stderr: $(cat "$work/stderr")"
for target in all demo check install uninstall help; do
    grep -qE "^  make $target +[a-z]" "$work/said" || fail "make help: no $target in: $(cat "$work/said")"
done

bare make sh grep sed nproc find mkdir cc gcc
if PATH=$work/bin make all CUDA= O="$work/build" >"$work/said" 2>&1; then fail 'make without pkg-config built something'; fi
grep -q 'Something to build with is missing: .*pkgconf.*libinih-dev' "$work/said" || fail "make: nothing is named in: $(cat "$work/said")"
grep -q 'make demo' "$work/said" || fail "make: no way out in: $(cat "$work/said")"
if grep -q 'pkg-config: No such file' "$work/said"; then fail "make: $(cat "$work/said")"; fi

# ---- check-device.sh: 77 and a sentence where it cannot run; of its tests too ----
device() { # device EXIT WORD BUILD
    local got=0
    LOCKSD_ORACLE=$work/none tests/tools/check-device.sh "$3" >"$work/said" 2>&1 || got=$?
    [ "$got" = "$1" ] || fail "check-device.sh $3: exit $got, not $1: $(cat "$work/said")"
    grep -qF -- "$2" "$work/said" || fail "check-device.sh $3: no '$2' in: $(cat "$work/said")"
    if grep -q 'FAIL\|No such file' "$work/said"; then fail "check-device.sh $3: $(cat "$work/said")"; fi
}
program() { # program NAME EXIT
    mkdir -p "$(dirname "$work/fake/$1")"
    printf '#!/bin/sh\nexit %d\n' "$2" >"$work/fake/$1"
    chmod +x "$work/fake/$1"
}
device 1 'there is no build in' "$work/fake"
program locksd 0
device 77 'was built without CUDA' "$work/fake"
program cuda/test_build 77
device 77 'there is no GPU here' "$work/fake"
for test in build step graph client; do program "cuda/test_$test" 0; done
device 0 'no reference at' "$work/fake"
echo 'make: says what is missing'
