#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test_replay.sh BUILD - what a first user of locks-replay stumbles over has words, and its private daemon never outlives it.
set -u
build=$(realpath "$1")
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d /tmp/locksd-replay.XXXXXX)
daemon=
# A child that a signal meets before its command has begun runs the trap too: it is for this shell alone.
trap '[ "$BASHPID" = $$ ] && { [ -z "$daemon" ] || kill "$daemon" 2>/dev/null; rm -rf "$work"; }' EXIT
unset LOCKSD # the one beside the tool
export XDG_RUNTIME_DIR=$work/run
mkdir "$XDG_RUNTIME_DIR"
replay=$build/locks-replay
device=${LOCKSD_TEST_DEVICE:-cpu}
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

refused() { # refused EXIT WORD OPTION...: that exit code, and WORD in the one line of stderr
    local want=$1 word=$2 got
    shift 2
    "$replay" --device "$device" "$@" >"$work/stdout" 2>"$work/stderr"
    got=$?
    [ "$got" = "$want" ] || fail "$*: exit $got, not $want: $(cat "$work/stderr")"
    grep -qF -- "$word" "$work/stderr" || fail "$*: no '$word' in: $(cat "$work/stderr")"
    [ ! -s "$work/stdout" ] || fail "$*: wrote to stdout"
}

/usr/bin/python3 - "$work" <<'EOF' || exit 1
import sys
sys.path.insert(0, "tests/tools")
sys.dont_write_bytecode = True
import numpy as np
from traces import stored, write

folder = sys.argv[1]
rng = np.random.default_rng(1)


def tensor(*shape, dtype="F16"):
    return dtype, shape, stored(rng.standard_normal(shape), dtype)


def trace(name, **change):
    """One layer of 40 tokens, 8 steps, 2 KV heads x 2, d 64; a tensor given as None is left out."""
    parts = {"q": tensor(8, 4, 64), "k": tensor(40, 2, 64), "v": tensor(40, 2, 64), **change}
    write(f"{folder}/{name}.safetensors", {f"layers.3.{x}": t for x, t in parts.items() if t})


trace("good")
trace("no-k", k=None)
trace("no-q", q=None)
trace("flat", q=tensor(8, 256))
trace("short-v", v=tensor(39, 2, 64))
trace("other-d", k=tensor(40, 2, 80))
trace("other-type", v=tensor(40, 2, 64, dtype="F32"))
trace("int", q=("I32", (8, 4, 64), bytes(8 * 4 * 64 * 4)))
trace("heads", q=tensor(8, 3, 64))
trace("steps", q=tensor(41, 4, 64))
trace("empty", q=("F16", (0, 4, 64), b""))
trace("d72", q=tensor(8, 4, 72), k=tensor(40, 2, 72), v=tensor(40, 2, 72))
trace("d100", q=tensor(8, 4, 100), k=tensor(40, 2, 100), v=tensor(40, 2, 100))
trace("group33", q=tensor(8, 66, 64))
trace("heads300", q=tensor(8, 300, 64), k=tensor(40, 300, 64), v=tensor(40, 300, 64))
trace("no-prompt", q=tensor(40, 4, 64))
trace("longer", k=tensor(100, 2, 64), v=tensor(100, 2, 64))
trace("one", q=tensor(1, 4, 64), k=tensor(1, 2, 64), v=tensor(1, 2, 64))
needle = np.zeros((40, 2, 64))
needle[5] = 20
trace("sharp", q=("F16", (8, 4, 64), stored(np.full((8, 4, 64), 2.0), "F16")), k=("F16", needle.shape, stored(needle, "F16")))
needle = np.zeros((100, 2, 64))
needle[5] = 20
trace("sharper", q=("F16", (8, 4, 64), stored(np.full((8, 4, 64), 2.0), "F16")), k=("F16", needle.shape, stored(needle, "F16")), v=tensor(100, 2, 64))
write(f"{folder}/other.safetensors", {"weight": tensor(3, 3)})
write(f"{folder}/prefixed.safetensors", {f"model.layers.{i}.q": tensor(8, 4, 64) for i in range(6)})
write(f"{folder}/nothing.safetensors", {})
data = open(f"{folder}/good.safetensors", "rb").read()
open(f"{folder}/cut.safetensors", "wb").write(data[:-100])
EOF

at() { echo "$work/$1.safetensors"; }
for name in no-k flat short-v other-d other-type int heads steps empty cut other d72; do
    grep -q . "$(at $name)" || fail "no trace $name"
done
refused 65 'no tensor layers.3.k [tokens, kv_heads, d]' --trace "$(at no-k)"
refused 65 'no tensor layers.3.q [steps, q_heads, d]' --trace "$(at no-q)"
refused 65 'tensor layers.3.q has shape [8, 256], expected three dimensions' --trace "$(at flat)"
refused 65 'tensor layers.3.v has shape [39, 2, 64], expected [40, 2, 64]' --trace "$(at short-v)"
refused 65 'expected [40, 2, 64]' --trace "$(at other-d)"
refused 65 'tensor layers.3.v is of F32, expected F16' --trace "$(at other-type)"
refused 65 'tensor layers.3.q is of I32, expected F16, BF16 or F32' --trace "$(at int)"
refused 65 'its 3 query heads are no multiple of the 2 KV heads' --trace "$(at heads)"
refused 65 'more steps than layers.3.k has tokens, [40, 2, 64]' --trace "$(at steps)"
refused 65 'dimension 0 must be between 1 and' --trace "$(at empty)"
refused 65 'cut short' --trace "$(at cut)"
refused 65 'not a trace; it has weight' --trace "$(at other)"
refused 65 'not a trace; it has model.layers.0.q, model.layers.1.q, model.layers.2.q, model.layers.3.q and 2 more' --trace "$(at prefixed)"
refused 65 'not a trace; it has no tensor' --trace "$(at nothing)"
refused 65 'no tensor layers.4.q' --trace "$(at good)" --layers 4
refused 66 'No such file' --trace "$work/nothing"
refused 65 'tensor layers.3.q has shape [8, 4, 72]: head_dim is 72; it may be 64, 80, 96' --trace "$(at d72)"
refused 65 'tensor layers.3.q has shape [8, 4, 100]' --trace "$(at d100)"
refused 65 'tensor layers.3.q has shape [8, 66, 64]: group is 33; it may be 1 to 32' --trace "$(at group33)"
refused 65 'tensor layers.3.k has shape [40, 300, 64]: kv_heads is 300; it may be 1 to 256' --trace "$(at heads300)"
refused 64 'rank is 3; it may be 2, 4, 8 or 16' --trace "$(at good)" --rank 3
refused 64 'rank is 5; it may be 2, 4, 8 or 16' --trace "$(at good)" --rank 5
refused 64 '--page-tokens 12 --rank 8: page_tokens is 12; it may be 8, 16, 32 or 64' --trace "$(at good)" --page-tokens 12
refused 64 '--page-tokens 8 --rank 16: rank is 16; with page_tokens 8 it may be 2, 4 or 8' --trace "$(at good)" --rank 16 --page-tokens 8
refused 64 '--json takes no value' --trace "$(at good)" --json=1
refused 64 '1 token is less than a page' --trace "$(at good)" --budget 1
refused 64 '1 token is less than a page' --trace "$(at good)" --budget 1 --dense
refused 64 "--budget: '2G' is no whole number" --trace "$(at good)" --budget 2G
refused 69 'is locksd running?' --trace "$(at good)" --socket "$work/nothing"
refused 73 "$work/no/such/folder" --trace "$(at good)" --out "$work/no/such/folder"
grep -q 'done in' "$work/stderr" && fail 'an output that cannot be made is found only after the work'
ln -s good.safetensors "$work/symbolic"
ln "$(at good)" "$work/hard"
cp "$(at good)" "$work/copy"
for name in "$(at good)" "$work/symbolic" "$work/hard" "$work/./symbolic"; do
    refused 64 "$name is the trace itself" --trace "$(at good)" --out "$name"
done
cmp "$(at good)" "$work/copy" || fail 'the trace was overwritten'
refused 64 '--trace FILE is missing'
refused 64 '--trace: its value is empty' --trace ''
refused 64 '--out: its value is empty' --trace x --out=
refused 64 '--socket: its value is empty' --trace x --socket ''
refused 64 "unknown option '--trase'" --trase x
refused 64 "--scan: 'deep' is none of" --trace x --scan deep
refused 64 "--mass: '1.5'" --trace x --mass 1.5
refused 64 '15 tokens are less than a page, 16' --trace x --budget 15
refused 64 'layer 5 twice' --trace x --layers 5,20,5
refused 64 "--layers: '' is no whole number" --trace x --layers 5,
refused 64 'its value is missing' --trace
LOCKSD=$work/nothing refused 69 "$work/nothing cannot be run" --trace "$(at good)"
LOCKSD=/bin/false refused 69 'it said nothing' --trace "$(at good)"

"$replay" --device "$device" --trace "$(at good)" --budget 1K 2>/dev/null | grep -qF 'budget 1024 tokens' || fail '--budget 1K'

# A mass target below the smallest float is not none: four pages are kept, of a budget of eight.
for mass in 1e-30 1e-46 1e-320; do
    "$replay" --device "$device" --trace "$(at longer)" --page-tokens 8 --budget 64 --mass "$mass" --out "$work/$mass" >/dev/null 2>&1 ||
        fail "--mass $mass"
    cmp "$work/1e-30" "$work/$mass" || fail "--mass $mass is no target"
done

# A mass target of 1 is all the budget holds, though one page has all the mass that a number can tell.
for mass in '' '--mass 1' '--mass 0.9999'; do
    # shellcheck disable=SC2086 # one option and its value
    "$replay" --device "$device" --trace "$(at sharper)" --page-tokens 8 --budget 64 $mass --out "$work/to$mass" >/dev/null 2>&1 || fail "sharper: $mass"
done
cmp "$work/to" "$work/to--mass 1" || fail '--mass 1 leaves out what the budget holds'
cmp -s "$work/to" "$work/to--mass 0.9999" && fail '--mass 0.9999 is no target'

# What takes long says so: a line a task, on a terminal a bar.
"$replay" --device "$device" --trace "$(at good)" --budget 16 --compare 2>"$work/stderr" >/dev/null || fail "tasks: $(cat "$work/stderr")"
for task in 'starting a daemon' 'looking through the trace' 'appending the prompt' 'decoding' 'computing exact attention'; do
    grep -q "^$task: done in" "$work/stderr" || fail "no word of $task: $(cat "$work/stderr")"
done
script -qec "'$replay' --device $device --trace '$(at good)' --budget 16" /dev/null </dev/null >"$work/stdout" ||
    fail "on a terminal: $(cat "$work/stdout")"
grep -q 'looking through the trace *\[#*\] 100 %' "$work/stdout" || fail "no bar: $(cat "$work/stdout")"
mkdir -p "$work/alone" && cp "$replay" "$work/alone" # no daemon beside it
script -qec "PATH=/nowhere '$work/alone/${replay##*/}' --trace '$(at good)' --budget 16" /dev/null </dev/null >"$work/stdout" &&
    fail 'replayed without a daemon'
grep -q 'starting a daemon *\[\.*\]   0 %' "$work/stdout" || fail "no bar: $(cat "$work/stdout")"
grep -q '^locks-replay: a daemon of its own, with .* for the trace: the private daemon ' "$work/stdout" || fail "a sentence in a bar's line: $(cat "$work/stdout")"

# What --compare says of a selector is a number, though it missed a key beside which all it chose is nothing.
"$replay" --device "$device" --trace "$(at sharp)" --budget 16 --compare --json >"$work/stdout" 2>"$work/stderr" ||
    fail "sharp: $(cat "$work/stderr")"
grep -q '"output_error": null' "$work/stdout" && fail 'an error of a selector is no number'

# Smallest traces: every query from the first token on; one token.
for name in good no-prompt one; do
    "$replay" --device "$device" --trace "$(at $name)" --budget 16 --compare --json --out "$work/out" >"$work/stdout" 2>"$work/stderr" ||
        fail "$name: $(cat "$work/stderr")"
    /usr/bin/python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$work/stdout" || fail "$name: no JSON"
done

# A running daemon: one without a pool that fits says what is needed and what is there; one with it gives the same bits.
serve() {
    "$build/locksd" --foreground --config /dev/null --socket "$work/socket" --set 'pool other.layers=2' \
        --set "daemon.device=$device" --set 'pool other.kv_heads=2' --set 'pool other.group=2' --set 'pool other.head_dim=64' \
        --set "pool other.dtype=$1" --set 'pool other.memory=8M' >"$work/daemon.log" 2>&1 &
    daemon=$!
    for _ in $(seq 600); do grep -q '^ready' "$work/daemon.log" && return; sleep 0.05; done
    fail "no daemon: $(cat "$work/daemon.log")"
}
serve bf16
refused 69 'head_dim 64, page_tokens 16, rank 8, dtype fp16' --trace "$(at good)" --socket "$work/socket"
refused 69 'pool other has 2 layers, kv_heads 2, group 2' --trace "$(at good)" --socket "$work/socket"
kill "$daemon"; wait "$daemon"
serve fp16
"$replay" --device "$device" --trace "$(at good)" --budget 32 --out "$work/private" >/dev/null 2>&1 || fail 'a private daemon'
"$replay" --trace "$(at good)" --budget 32 --out "$work/shared" --socket "$work/socket" >/dev/null 2>&1 || fail 'a running daemon'
cmp "$work/private" "$work/shared" || fail 'a private and a running daemon differ'
kill "$daemon"; wait "$daemon"; daemon=

# A private daemon that is never ready dies with the tool, however that dies; what it left beside its socket's path goes too.
# shellcheck disable=SC2016 # the script expands; its fourth word is the socket
printf '#!/bin/sh\n: >"${4%%?}~"\necho $$ >"%s/pid"\nexec sleep 60\n' "$work" >"$work/sleeper"
chmod +x "$work/sleeper"
mkdir "$work/outs"
echo before >"$work/outs/out"
for signal in TERM HUP KILL; do
    rm -f "$work/pid"
    LOCKSD=$work/sleeper "$replay" --trace "$(at good)" --out "$work/outs/out" >/dev/null 2>&1 &
    tool=$!
    for _ in $(seq 600); do [ -s "$work/pid" ] && break; sleep 0.05; done
    kill -"$signal" "$tool"
    wait "$tool" 2>/dev/null
    for _ in $(seq 600); do kill -0 "$(cat "$work/pid")" 2>/dev/null || break; sleep 0.05; done
    kill -0 "$(cat "$work/pid")" 2>/dev/null && fail "SIG$signal: the daemon lives on" && kill -9 "$(cat "$work/pid")"
    [ "$signal" = KILL ] && rm -rf "$XDG_RUNTIME_DIR"/locksd-private.* # nobody was left to do it
    [ -z "$(ls -A "$XDG_RUNTIME_DIR")" ] || fail "SIG$signal: left behind: $(find "$XDG_RUNTIME_DIR")"
    [ "$(cat "$work/outs/out")" = before ] || fail "SIG$signal: the old output is gone"
    [ "$signal" = KILL ] || [ "$(ls -A "$work/outs")" = out ] || fail "SIG$signal: left behind: $(find "$work/outs")"
done
[ "$failures" = 0 ] && echo 'replay: every mistake has words, no daemon is left behind'
[ "$failures" = 0 ]
