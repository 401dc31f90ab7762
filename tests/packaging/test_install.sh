#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test_install.sh BUILD - a staged install is complete and usable: hello compiles against it by pkg-config alone, with the
# shared and the static library, and runs against an installed daemon; only locks_* is exported; man pages and units parse.
# What cannot work is refused before anything is copied; uninstall leaves nothing but the configuration.
set -euo pipefail
build=$(realpath "$1")
cd "$(dirname "$0")/../.."
root=$(mktemp -d /tmp/locksd-install.XXXXXX)
daemon=
# A child that a signal meets before its command has begun runs the trap too: it is for this shell alone.
trap '[ "$BASHPID" = $$ ] && { [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true; rm -rf "$root"; }' EXIT
fail() { echo "FAIL: $*"; exit 1; }

make -s install O="$build" DESTDIR="$root" PREFIX=/usr
export PKG_CONFIG_PATH=$root/usr/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
hello=$root/usr/share/doc/locksd/hello.c
lines=$(wc -l <"$hello")
[ "$lines" -lt 80 ] || fail "hello.c has $lines lines, not under 80"
# shellcheck disable=SC2046 # flags are words
cc -Wall -Wextra -Werror "$hello" -o "$root/hello" $(pkg-config --cflags --libs liblocks) -lm
# shellcheck disable=SC2046
cc -Wall -Wextra -Werror "$hello" -o "$root/hello-static" $(pkg-config --cflags liblocks) "$root/usr/lib/liblocks.a" \
    $(pkg-config --libs --static liblocks | sed 's/-llocks//') -lm

foreign=$(nm -D --defined-only "$root/usr/lib/liblocks.so" | awk '{print $3}' | grep -v '^locks_.*@@LOCKS_' | grep -v '^LOCKS_' || true)
[ -z "$foreign" ] || fail "liblocks.so exports what is not locks_*: $foreign"
readelf -d "$root/usr/lib/liblocks.so" | grep -q 'SONAME.*liblocks.so.1' || fail "no soname liblocks.so.1"

"$root/usr/sbin/locksd" --foreground --socket "$root/locksd.sock" --config packaging/locksd.conf \
    --set 'pool default.memory=64M' >"$root/log" 2>&1 &
daemon=$!
# A socket that is there need not be listened at yet.
answers() { "$root/usr/bin/locksctl" status --socket "$root/locksd.sock" >/dev/null 2>&1; }
for _ in $(seq 300); do answers && break; sleep 0.1; done
answers || { cat "$root/log"; fail "the installed daemon did not answer in 30 s"; }
LD_LIBRARY_PATH=$root/usr/lib "$root/hello" "$root/locksd.sock" || fail "hello (shared)"
"$root/hello-static" "$root/locksd.sock" || fail "hello (static)"
"$root/usr/bin/locksctl" pools --socket "$root/locksd.sock" || fail "locksctl pools"
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon's exit code is $?"
daemon=

for page in "$root"/usr/share/man/man*/*; do
    LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=100 man --warnings -E UTF-8 -l -Tutf8 -Z "$page" >/dev/null 2>"$root/man.log" || fail "man $page"
    [ ! -s "$root/man.log" ] || { cat "$root/man.log"; fail "warnings in $page"; }
done
for name in locksd.8 locksctl.1 locks-replay.1 locks-bench.1 locksd.conf.5 liblocks.3; do
    find "$root/usr/share/man" -name "$name" | grep -q . || fail "no man page $name"
done
if command -v systemd-analyze >/dev/null; then
    sed -i "s|/usr/sbin/locksd|$root/usr/sbin/locksd|; s|/usr/bin/locksctl|$root/usr/bin/locksctl|" "$root"/usr/lib/systemd/system/*.service
    out=$(systemd-analyze verify --man=no "$root"/usr/lib/systemd/system/locksd.service "$root"/usr/lib/systemd/system/locksd.socket 2>&1 | grep -i locksd || true)
    [ -z "$out" ] || fail "systemd-analyze: $out"
fi

# ---- where it cannot go, where nothing looks, and away again ----
stage() { # stage VERB PREFIX: into a folder of its own
    make -s "$1" O="$build" DESTDIR="$root/stage" PREFIX="$2" >"$root/said" 2>&1
}
refused() { # refused PREFIX WORD
    if stage install "$1"; then fail "PREFIX=$1 was taken"; fi
    grep -qF -- "$2" "$root/said" || fail "PREFIX=$1: no '$2' in: $(cat "$root/said")"
    [ ! -e "$root/stage" ] || fail "PREFIX=$1 was refused when something was copied"
}
refused opt 'is not an absolute path'
refused '' 'is not an absolute path'
refused '/opt/with space' 'letters, digits'
refused '/opt/a|b' 'letters, digits'
refused /../opt 'leads out of DESTDIR'
refused /usr/.. 'leads out of DESTDIR'
stage install /usr/local || fail "PREFIX=/usr/local: $(cat "$root/said")"
[ ! -s "$root/said" ] || fail "PREFIX=/usr/local: $(cat "$root/said")"
stage uninstall /usr/local || fail "uninstall: $(cat "$root/said")"
[ "$(find "$root/stage" ! -type d)" = "$root/stage/etc/locksd/locksd.conf" ] || fail "uninstall left: $(find "$root/stage" ! -type d)"
grep -qF "left, since other installations read it too: $root/stage/etc/locksd" "$root/said" || fail "uninstall: $(cat "$root/said")"
stage install /opt/locks || fail "PREFIX=/opt/locks: $(cat "$root/said")"
for words in 'systemctl link /opt/locks/lib/systemd/system/locksd.socket' 'systemd-sysusers /opt/locks/' 'MANPATH=:/opt/locks/share/man'; do
    grep -qF -- "$words" "$root/said" || fail "PREFIX=/opt/locks: no '$words' in: $(cat "$root/said")"
done
echo '# edited' >>"$root/stage/etc/locksd/locksd.conf"
stage uninstall /opt/locks || fail "uninstall: $(cat "$root/said")"
[ "$(find "$root/stage" ! -type d)" = "$root/stage/etc/locksd/locksd.conf" ] || fail "uninstall left: $(find "$root/stage" ! -type d)"
if [ "$(id -u)" != 0 ]; then as_nobody=
elif setpriv --reuid=65534 --clear-groups test -r packaging/install.sh 2>/dev/null; then as_nobody='setpriv --reuid=65534 --clear-groups'
else as_nobody=none; fi
if [ "$as_nobody" != none ]; then
    chmod 711 "$root"
    mkdir -m 555 "$root/closed"
    $as_nobody packaging/install.sh install "$build" "$root/closed" /usr 0 1 >"$root/said" 2>&1 && fail 'a closed folder was written'
    grep -q 'be root, or .*PREFIX= .*DESTDIR=' "$root/said" || fail "no hint in: $(cat "$root/said")"
    packaging/install.sh install "$build" "$root/own" /usr 0 1
    [ -z "$as_nobody" ] || chown -R 65534 "$root/own/usr"
    chmod 555 "$root/own/etc" "$root/own/etc/locksd"
    $as_nobody packaging/install.sh uninstall "$build" "$root/own" /usr 0 1 >"$root/said" 2>&1 || fail "what it leaves it need not write: $(cat "$root/said")"
    chmod 755 "$root/own/etc" "$root/own/etc/locksd"
fi
echo "install: complete"
