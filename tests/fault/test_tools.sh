#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test_tools.sh BUILD - the tools and the daemon in a hostile place: files that lie, full disks, small limits, signals,
# daemons that die or hang. Each ends with its exit code and a sentence, and leaves nothing behind.
set -u
build=$(realpath "$1")
work=$(mktemp -d /tmp/locksd-tools.XXXXXX)
export XDG_RUNTIME_DIR=$work/run
mkdir "$XDG_RUNTIME_DIR"
# A child that a signal meets before its command has begun runs the trap too: it is for this shell alone.
trap '[ "$BASHPID" = $$ ] && { kill $(jobs -p) 2>/dev/null; rm -rf "$work"; }' EXIT
unset LOCKSD LOCKSD_SOCKET
exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&- # what it was started with counts against small limits below
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

ends() { # ends EXIT WORD COMMAND...: with that exit code, and WORD (if any) in what it says
    local want=$1 word=$2 got
    shift 2
    timeout --kill-after=5 100 "$@" >"$work/said" 2>&1 </dev/null
    got=$?
    [ "$got" = "$want" ] || fail "$*: exit $got, not $want: $(tail -n 3 "$work/said")"
    [ -z "$word" ] || grep -qF -- "$word" "$work/said" || fail "$*: no '$word' in: $(tail -n 3 "$work/said")"
}
patiently() { # patiently COMMAND...: until it succeeds, for 30 s: that catches what hangs, not a slow machine
    local end=$((SECONDS + 30)) late=
    until "$@"; do
        [ -z "$late" ] || return 1
        sleep 0.05
        [ "$SECONDS" -lt "$end" ] || late=yes # one more
    done
}
is_ready() { grep -qs '^ready' "$1"; }
await_end() { timeout 30 tail --pid="$1" -s 0.05 -f /dev/null; } # await_end PID
is_clean() { [ -z "$(ls "$XDG_RUNTIME_DIR")" ] && ! pgrep -f "locksd.*$XDG_RUNTIME_DIR" >/dev/null; }
nothing_left() { # nothing_left WHAT: no private daemon, no socket of one
    patiently is_clean || fail "$1 left: $(ls "$XDG_RUNTIME_DIR") $(pgrep -af "locksd.*$XDG_RUNTIME_DIR")"
}

# ---- trace files that lie ----
cat >"$work/make.py" <<'END'
import json, struct, sys

folder = sys.argv[1]
pattern = bytes((i * 37 + 11) % 251 if i % 2 == 0 else 0x38 + (i * i >> 3) % 3 for i in range(2 * 4099))


def file(name, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(f"{folder}/{name}", "wb") as out:
        out.write(struct.pack("<Q", len(text) if length is None else length) + text + data)


def trace(steps, tokens, **change):
    parts, at = {}, 0
    for part, shape in (("q", [steps, 4, 64]), ("k", [tokens, 2, 64]), ("v", [tokens, 2, 64])):
        size = 2 * shape[0] * shape[1] * 64
        parts[f"layers.0.{part}"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]} | change.get(part, {})
        at += size
    return parts, (pattern * (at // len(pattern) + 1))[:at]


def layer(name):
    return {key.replace(".0.", f".{name}."): value for key, value in trace(8, 40)[0].items()}


good, data = trace(8, 40)
text = json.dumps(good).encode()
file("good", good, data)
file("long", *trace(16000, 16384))
file("empty-header", b"", b"", 0)
file("length", b"{}", b"", 2**63)
file("length-wraps", b"{}", b"", 2**64 - 8)
file("no-json", b"hello")
file("array", [])
file("deep", b'{"a":' * 100000)
file("twice", text[:-1] + b"," + text[1:], data)
file("offset-negative", *trace(8, 40, q={"data_offsets": [-1, 4095]}))
file("offset-back", *trace(8, 40, q={"data_offsets": [4096, 0]}))
file("offset-wraps", *trace(8, 40, v={"data_offsets": [2**63 - 10241, 2**63 - 1]}))
file("offset-overlap", *trace(8, 40, v={"data_offsets": [4096, 14336]}))
file("offset-fraction", *trace(8, 40, v={"data_offsets": [14336.5, 24576.5]}))
file("shape-wraps", *trace(8, 40, q={"shape": [2**32, 2**32, 64]}))
file("shape-negative", *trace(8, 40, q={"shape": [-8, 4, 64]}))
file("shape-word", *trace(8, 40, q={"shape": "8"}))
file("shape-many", *trace(8, 40, q={"shape": [1] * 1000}))
file("dtype-none", *trace(8, 40, q={"dtype": None}))
file("layer-negative", layer("-1"), data)
file("layer-wraps", layer("4294967296"), data)
file("layer-padded", layer("00"), data)
file("escapes", {"layers.0.q\033[2J": {"dtype": "\033]0;x\007", "shape": [], "data_offsets": [0, 0]}})
file("nan", good, b"\x00\x7e" * (len(data) // 2))
k, v = (good[f"layers.0.{part}"]["data_offsets"][0] for part in "kv")
some = bytearray(data)
some[k + 100 : k + 104], some[v : v + 2] = b"\x00\x7c\x00\xfe", b"\x01\xfc"  # infinite, NaN; NaN
file("some", good, bytes(some))
END
/usr/bin/python3 "$work/make.py" "$work" || exit 1
replay=$build/locks-replay
device=${LOCKSD_TEST_DEVICE:-cpu}
lies() { ends 65 "$2" "$replay" --device "$device" --trace "$work/$1" --budget 16; }
printf '1234567' >"$work/short"
lies short 'it has 7 bytes'
lies empty-header 'no JSON object'
lies length 'claims 9223372036854775808 bytes'
lies length-wraps 'claims 18446744073709551608 bytes'
lies no-json 'no JSON object'
lies array 'no JSON object'
lies deep 'maximum parsing depth'
lies twice 'duplicate object key'
for name in offset-negative offset-back offset-fraction; do lies $name '"data_offsets" [begin, end]'; done
lies offset-wraps 'tensor layers.0.v'
lies offset-overlap 'they overlap'
lies shape-wraps 'overflows 64 bits'
lies shape-negative 'dimension 0 is no whole number'
lies shape-word 'no "shape" array'
lies shape-many '1000 dimensions'
lies dtype-none 'no "dtype" string'
for name in layer-negative layer-wraps layer-padded; do lies $name 'not a trace'; done
lies escapes 'tensor layers.0.q?[2J has dtype "?]0;x?"'
mkfifo "$work/pipe" # that nobody writes to
for path in "$work" /dev/zero "$work/pipe"; do ends 65 'not a regular file' "$replay" --device "$device" --trace "$path"; done
ends 0 'a step took' "$replay" --device "$device" --trace "$work/nan" --budget 16 --compare
values='values of tensor layers.0.k (2 of 5120) are NaN or infinite; tensors with such values: 2.'
for budget in 16 640; do
    ends 0 "$values" "$replay" --device "$device" --trace "$work/some" --budget $budget --compare
    grep -q -e '-nan' "$work/said" && fail "a figure that is -nan: $(grep -e '-nan' "$work/said")"
done
# Threads that compute have a stack of their own, whatever the limit gives.
ends 0 'a step took' bash -c "ulimit -s 128; exec $replay --device $device --trace $work/good --budget 16"
ends 0 '1 layer of 40 tokens, 8 steps, 2 KV heads' "$replay" --device "$device" --trace "$work/good" --budget 16 --compare
grep -q '1 page of 16' "$work/said" || fail "no '1 page' in: $(cat "$work/said")"
grep -q ' 0[.]00 ns' "$work/said" && fail "no time, to two digits: $(cat "$work/said")"
grep -q 'warning' "$work/said" && fail "a warning of a good trace: $(cat "$work/said")"

# ---- places that are full, missing or small ----
good=(--device "$device" --trace "$work/good" --budget 16)
ends 0 'a step took' "$replay" "${good[@]}"
ends 73 'No space left on device' "$replay" "${good[@]}" --out /dev/full
for tool in "$replay ${good[*]}" "$replay ${good[*]} --json" "$replay --help" "$replay --version" "$build/locksctl --help" \
    "$build/locks-bench --help"; do
    ends 74 "$(basename "${tool%% *}"): standard output cannot be written: No space left on device" bash -c "exec $tool >/dev/full"
done
for tool in locksd locksctl locks-replay locks-bench; do ends 0 "usage: $tool " "$build/$tool" -h; done
mkdir "$work/gone" # nothing can be made where a folder was, whoever asks
ends 69 'cannot be made' bash -c "cd '$work/gone' && rmdir '$work/gone' && XDG_RUNTIME_DIR=/proc/self/cwd exec $replay ${good[*]}"
ends 69 'Too many open files' bash -c "ulimit -n 5; exec $replay ${good[*]}"
if nm "$build/locksd" | grep -q __asan_init; then echo 'no limits of memory under AddressSanitizer'; else
    # What is asked for first that there is no room for, memory or a thread's stack, is not the same everywhere.
    ends 69 'did not start: locksd: error: ' bash -c "ulimit -v 35000; exec $replay ${good[*]}"
fi
nothing_left 'what did not start'

# ---- a daemon that hangs: waited for beside all that follows ----
hung=$work/hung
pool=(--set "daemon.device=$device")
for key in layers=1 kv_heads=2 group=2 head_dim=64 memory=64M dtype=fp16; do pool+=(--set "pool a.$key"); done
"$build/locksd" --config /dev/null --foreground --socket "$hung" "${pool[@]}" >"$work/hung.log" 2>&1 &
hung_daemon=$!
patiently is_ready "$work/hung.log" || fail "no daemon to hang: $(cat "$work/hung.log")"
cp "$work/long" "$work/longer" # the other is cut below
"$replay" --trace "$work/longer" --socket "$hung" --budget 512 >"$work/hung.decoding" 2>&1 &
decoding=$!
patiently grep -q 'appending the prompt: done' "$work/hung.decoding" || fail "no decoding begins: $(cat "$work/hung.decoding")"
kill -STOP "$hung_daemon"
timeout 60 "$replay" --trace "$work/good" --socket "$hung" >"$work/hung.replay" 2>&1 &
hung_replay=$!
timeout 60 "$build/locksctl" --socket "$hung" status >"$work/hung.ctl" 2>&1 &
hung_ctl=$!
timeout 60 "$build/locksctl" --socket "$hung" drain >"$work/hung.drain" 2>&1 &
hung_drain=$!
hung_ended() { # hung_ended EXIT PID FILE WORD
    wait "$2"
    local got=$?
    if [ "$got" != "$1" ] || ! grep -qF -- "$4" "$work/$3"; then
        fail "beside a daemon that hangs: exit $got, not $1: $(tail -n 2 "$work/$3")"
    fi
}

# ---- signals ----
start_long() { # a replay that lasts some seconds, and decodes
    : >"$work/said" # what the last one said is gone before this one is looked at
    env --default-signal=INT,QUIT "$replay" --device "$device" --trace "$work/long" --budget 512 >"$work/said" 2>&1 &
    tool=$!
    patiently grep -q 'appending the prompt: done' "$work/said" || fail "no decoding begins: $(cat "$work/said")"
}
tool_ends() { # tool_ends EXIT WHAT
    local got
    await_end "$tool" || kill -KILL "$tool"
    wait "$tool" 2>/dev/null
    got=$?
    [ "$got" = "$1" ] || fail "$2: exit $got, not $1: $(tail -n 2 "$work/said")"
    [ "$1" != 137 ] || rm -rf "${XDG_RUNTIME_DIR:?}"/* # the killed cannot tidy up; its daemon must be gone
    nothing_left "$2"
}
for pause in 0 0.001 0.002 0.003 0.004 0.005 0.006 0.008 0.01 0.02 0.05; do # before, while and after its daemon starts
    env --default-signal=INT "$replay" --device "$device" --trace "$work/long" --budget 512 >"$work/said" 2>&1 &
    tool=$!
    sleep "$pause"
    kill -INT "$tool"
    wait "$tool" 2>/dev/null
    nothing_left "SIGINT after $pause s"
done
start_long; kill -INT "$tool"; tool_ends 130 'SIGINT while decoding'
start_long; kill -KILL "$tool"; tool_ends 137 'SIGKILL while decoding'
start_long; kill -KILL "$(pgrep -P "$tool" locksd)"; tool_ends 70 'SIGKILL of the daemon while decoding'
grep -q 'the daemon is gone' "$work/said" || fail "no word of the daemon's death: $(tail -n 2 "$work/said")"
start_long; kill -STOP "$(pgrep -P "$tool" locksd)"; sleep 0.2; kill -INT "$tool"; tool_ends 130 'SIGINT beside a stopped daemon'
start_long; kill -QUIT "$tool"; tool_ends 131 'SIGQUIT while decoding'
env --default-signal=INT "$replay" --device "$device" --trace "$work/long" --budget 512 <&- >&- 2>&- & # which it shall not fill
tool=$!
patiently pgrep -P "$tool" locksd >/dev/null || fail 'no daemon with closed streams'
for fd in 0 1 2; do
    [ "$(readlink "/proc/$tool/fd/$fd")" = /dev/null ] || fail "a closed stream became $(readlink "/proc/$tool/fd/$fd")"
done
kill -INT "$tool"; tool_ends 130 'SIGINT with closed streams'
start_long; truncate -s 4096 "$work/long"; tool_ends 65 'a trace that is cut while decoding' # the last use of it
grep -q 'was cut short while it was read' "$work/said" || fail "no word of the cut: $(tail -n 2 "$work/said")"

# ---- sockets ----
socket=$work/socket
pool=(--set "daemon.device=$device")
for key in layers=1 kv_heads=1 group=1 head_dim=64 memory=1M; do pool+=(--set "pool a.$key"); done
serve=("$build/locksd" --config /dev/null --foreground --socket "$socket")
"${serve[@]}" "${pool[@]}" >"$work/log" 2>&1 &
daemon=$!
patiently is_ready "$work/log" || fail "no daemon: $(cat "$work/log")"
ends 0 '"pools"' "$build/locksctl" --socket "$socket" status --json
mkfifo "$work/fifo"
exec 7<>"$work/fifo" # a reader that does not read
"$build/locksd" --config /dev/null --foreground --socket "$work/unread" "${pool[@]}" 2>"$work/fifo" &
unread=$!
patiently "$build/locksctl" --socket "$work/unread" status >"$work/said" 2>&1 || fail "no daemon: $(cat "$work/said")"
timeout 1 cat /dev/zero >"$work/fifo" # which is full now
ends 70 'has as many files open as it may' bash -c "ulimit -n 4; exec $build/locksctl --socket $socket status"
ends 69 'has as many files open as it may' bash -c "ulimit -n 6; exec $replay --trace $work/good --socket $socket"
for verb in drain resume status; do ends 0 '' "$build/locksctl" --socket "$work/unread" $verb; done
kill "$unread"
await_end "$unread" || fail 'a daemon whose log nobody reads does not end'
exec 7>&-
ends 74 'No space left on device' bash -c "exec '$build/locksctl' --socket '$socket' pools >/dev/full"
[ -e /run/locksd/locksd.sock ] || LOCKSD_SOCKET='' ends 69 'cannot connect to /run/locksd/' "$build/locksctl" pools
ends 73 'socket' "${serve[@]}" "${pool[@]}"
ends 69 'pool a has 1 layer, kv_heads 1' "$replay" "${good[@]}" --socket "$socket"
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null
[ -S "$socket" ] || fail 'the killed daemon has no socket left'
for path in "$socket" "$work" "$work/none" /dev/null; do
    ends 69 'is locksd running?' "$build/locksctl" --socket "$path" status
    ends 69 'is locksd running?' "$replay" "${good[@]}" --socket "$path"
done

# ---- what the bench's verbs take ----
bench() { local word=$1; shift; ends 64 "$word" "$build/locks-bench" "$@"; }
bench 'unknown option --bogus;' latency --bogus
bench 'unknown option --bogus;' cpu --bogus=3
bench 'unknown option --bogus;' --bogus
bench 'latency does not take --quick, it is of device;' latency --quick
bench 'cpu does not take --quick, it is of device;' cpu --quick
bench 'latency does not take --kv-heads, it is of cpu;' latency --kv-heads 3
bench 'latency does not take --context, it is of cpu device;' latency --context 4K
bench 'cpu does not take --device, it is of latency;' cpu --device cuda
bench 'cpu does not take --gpu, it is of latency device;' cpu --gpu=1
bench 'device does not take --threads, it is of cpu;' --device --threads 2
bench '--json takes no value;' cpu --json=x
bench '--rounds: its value is missing;' cpu --rounds
bench '--json: its value is missing;' device --json
bench "--context: '4G' is no whole number between 1024 and" cpu --context 4G
bench "--context: '1023' is no whole number" cpu --context 1023
bench "--context: '4096M' is no whole number" cpu --context 4096M
bench "--rounds: '4K' is no whole number between 1 and 1000" cpu --rounds 4K
bench "--kv-heads: '257' is no whole number between 1 and 256" cpu --kv-heads 257
bench 'is not a list of' device --context 4K,
bench 'is not a list of' device --heads 257/257
bench 'one verb at a time, not also cpu;' latency cpu
bench 'unknown verb speed;' speed
bench 'a verb is missing;'
bench 'a verb is missing;' --rounds 3
ends 0 'one row of 4096 tokens, 1 KV head x group 1, ' bash -c "ulimit -s 256; exec '$build/locks-bench' --context 4K cpu --kv-heads=1 --group 1 --threads 2 --rounds 1"

# ---- a daemon that lies ----
cat >"$work/liar.py" <<'END'
import os, socket, struct, sys

listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1] + "~")
listener.listen(8)
os.rename(sys.argv[1] + "~", sys.argv[1])  # whoever finds it is heard
while True:  # each question is answered with what the file holds by then
    client = listener.accept()[0]
    client.recv(4096)
    with open(sys.argv[2], "rb") as answer:
        text = answer.read()
    memory = os.memfd_create("text")
    os.write(memory, text)
    reply = struct.pack("<IHHiIQ240s", 0x534B434C, 9, 264, 0, 0, len(text), b"")
    socket.send_fds(client, [reply], [memory])
    os.close(memory)
    client.close()
END
liar=$work/liar
/usr/bin/python3 "$work/liar.py" "$liar" "$work/answer" &
patiently [ -S "$liar" ] || fail 'no daemon that lies'
plain() { ! LC_ALL=C grep -qP '[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]' "$work/said" || fail "$*: control characters: $(cat -v "$work/said")"; }
answers() { # answers EXIT TEXT: to every verb, and no control character reaches the terminal
    local verb
    printf '%s' "$2" >"$work/answer"
    for verb in status clients pools drain resume reload 'status --json'; do
        # shellcheck disable=SC2086
        ends "$1" '' "$build/locksctl" --socket "$liar" $verb
        plain "$verb of $2"
    done
}
e='\u001b]0;x\u0007\u009b2J\n\u007f'
answers 0 "{\"version\":\"$e\",\"engine\":\"$e\",\"placement\":{\"binding\":\"$e\",\"not_granted\":\"$e\"},
    \"pools\":[{\"name\":\"$e\",\"dtype\":\"$e\"}],\"clients\":[{\"name\":\"$e\"}],\"taken\":[\"$e\",7,null]}"
answers 0 '{"pid":-1,"clients":[{"id":-9223372036854775808,"pages":-1,"arena_bytes":9223372036854775807,"connected_seconds":-1}],
    "pools":[{"capacity_tokens":1,"free_tokens":-1,"kv_heads":-1,"group":-1,"memory_bytes":-1},1,null],"work":{"score_bytes":1e308}}'
for text in '[]' '{}' '{"clients":{},"pools":"","work":[],"placement":1,"taken":{},"device_arenas":[]}'; do answers 0 "$text"; done
printf -v deep '%0100000d' 0
for text in '' '1' "${deep//0/[}" $'{"\033[2J":\033}' $'{"a":"\xff\xfe"}' '{"pid":99999999999999999999}' '{"a":1e999}'; do
    answers 76 "$text"
done

# ---- the daemon that hangs: what became of its clients ----
hung_ended 70 "$decoding" hung.decoding 'decode: no answer: nothing was heard of the daemon for 30000 ms'
hung_ended 69 "$hung_replay" hung.replay 'the daemon did not answer the greeting within 30000 ms'
hung_ended 69 "$hung_ctl" hung.ctl 'the daemon did not answer the question within 30000 ms'
hung_ended 69 "$hung_drain" hung.drain 'a daemon that goes on later will not carry it out'
kill -CONT "$hung_daemon"
is_alone() { "$build/locksctl" --socket "$hung" status --json >"$work/said" && grep -q '"clients": 0,' "$work/said"; }
patiently is_alone || fail "clients of the daemon that hung are left: $(cat "$work/said")"
grep -q '"draining": false' "$work/said" || fail "it drains, though nobody waits for it to: $(cat "$work/hung.log")"
kill "$hung_daemon"
wait "$hung_daemon" || fail "the daemon that hung: exit $?"

# ---- the daemon itself ----
refuses() { local code=$1 word=$2; shift 2; ends "$code" "$word" "${serve[@]}" "$@"; }
refuses 78 'there is no [pool NAME] section'
refuses 64 'is not between' "${pool[@]}" --set 'pool a.memory=1K'
refuses 64 'is not between' "${pool[@]}" --set 'daemon.threads=100000'
refuses 71 'the pools and 2 workspaces of 1.0 TiB want' "${pool[@]}" --set daemon.workspace=1T
refuses 71 'available' "${pool[@]}" --set 'pool a.memory=16T'
e=$'\e]0;x\a\xc2\x9b2J\r\x7f' # in what is quoted: a sentence or the values in force say it without
printf '[daemon]\nthreads = %s\n' "$e" >"$work/odd.conf"
ends 78 'is not a number' "$build/locksd" --config "$work/odd.conf" --check-config; plain a value
ends 64 'there is no section' "$build/locksd" --config /dev/null --set "$e.x=1" --check-config; plain --set
ends 64 'unknown option' "$build/locksd" "--$e"$'\nforged'; plain an option
grep -q '^forged' "$work/said" && fail 'a quoted newline makes a line of its own'
ends 66 'cannot be opened' "$build/locksd" --config "$work/$e" --check-config; plain a path
"$build/locksd" --config /dev/null --socket "/$e" "${pool[@]}" --check-config >"$work/said" 2>&1 || fail 'odd socket'; plain values
printf 'x' >"$work/file"
ends 73 'is no socket: it is left alone' "$build/locksd" --config /dev/null --socket "$work/file" "${pool[@]}"
ends 73 'cannot be opened' "$build/locksd" --config /dev/null --socket "$work/none/socket" "${pool[@]}"
ends 73 'cannot listen there' "$build/locksd" --config /dev/null --socket /proc/socket "${pool[@]}"
[ "$(cat "$work/file")" = x ] || fail 'the file in the place of the socket was touched'
ends 71 'File too large' bash -c "ulimit -f 100; exec ${serve[*]@Q} ${pool[*]@Q}"
ends 71 'Too many open files' bash -c "ulimit -n 8; exec ${serve[*]@Q} ${pool[*]@Q}"
for what in --help --version "--config /dev/null ${pool[*]@Q} --check-config"; do
    ends 74 'standard output cannot be written: No space left on device' bash -c "exec $build/locksd $what >/dev/full"
done
nm "$build/locksd" | grep -q __asan_init ||
    ends 71 'no memory for ' bash -c "ulimit -v 60000; exec ${serve[*]@Q} ${pool[*]@Q} --set daemon.threads=1"

[ "$failures" -eq 0 ] && echo 'tools: all as they should be'
[ "$failures" -eq 0 ]
