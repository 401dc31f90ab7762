#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# lint.sh - formatting, static analysis and the house rules; every finding is an error.
set -u
cd "$(dirname "$0")/../.." || exit 1
rc=0
mapfile -t c < <(git ls-files '*.c')
mapfile -t h < <(git ls-files '*.h')
mapfile -t sh < <(git ls-files '*.sh' '.ci/run')
[ ${#c[@]} -gt 0 ] || { echo "lint: git names no sources here: nothing was read" >&2; exit 69; }

step() { # step NAME COMMAND...
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then echo "lint: $name ok"; else echo "lint: $name FAILED"; echo "$out" | head -n 200; rc=1; fi
}

# What is compiled only where CUDA is can be read only there.
cuda=${CUDA_HOME:-/usr/local/cuda}/include
if [ -r "$cuda/cuda_runtime_api.h" ]; then unread='^tests/'; else unread='^tests/|^graphs/cuda/(cuda_|lane|memory|sentry)|^clients/bench/cuda/'; fi
export cuda

# shellcheck disable=SC2016,SC2317 # called through step; the quoted part is for the inner shell
tidy() { # the host's C but for tests, which compare bits of floats on purpose; vector files need their own flags, which the file's name says
    printf '%s\n' "${c[@]}" | grep -Ev "$unread" | xargs -P "$(nproc)" -I{} sh -c '
        case {} in
        *_avx512.c) isa="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c" ;;
        *_avx2.c) isa="-mavx2 -mbmi2 -mfma -mf16c" ;;
        *) isa= ;;
        esac
        # The analyzer does not follow element stores into vector types; digits are signed bytes.
        case {} in
        kernels/cpu/*) checks=-bugprone-signed-char-misuse,-bugprone-integer-division,-clang-analyzer-core.uninitialized.*,-clang-analyzer-core.UndefinedBinaryOperatorResult,-clang-analyzer-security.FloatLoopCounter ;;
        *) checks= ;;
        esac
        out=$(clang-tidy --quiet --checks="$checks" {} -- -std=gnu17 -D_GNU_SOURCE -Ishm_protocol -Iclients -DLK_VERSION="\"lint\"" -isystem "$cuda" $isa 2>/dev/null) ||
            { echo "$out"; exit 1; }'
}

step 'house rules' /usr/bin/python3 tests/tools/house.py
step clang-format clang-format --dry-run -Werror "${c[@]}" "${h[@]}"
step shellcheck shellcheck "${sh[@]}"
step cppcheck cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 -j "$(nproc)" \
    -D__x86_64__ -DLK_VERSION='"lint"' -Ishm_protocol -Iclients --suppress=missingIncludeSystem --suppress=internalAstError \
    --suppress='uninitvar:kernels/cpu/*' --suppress='ctuuninitvar:kernels/cpu/*' --suppress=invalidPointerCast --suppress=invalidFunctionArg:kernels/cpu/score_portable.c --suppress=invalidPrintfArgType_uint \
    daemon shm_protocol kernels/cpu graphs clients
step clang-tidy tidy
exit $rc
