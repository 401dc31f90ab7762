#!/bin/sh
# SPDX-License-Identifier: MIT
# install.sh BUILD DESTDIR PREFIX VERSION ABI - what `make install` does.
set -eu
build=$1 destdir=$2 prefix=$3 version=$4 abi=$5
to=$destdir$prefix

install -d "$to/bin" "$to/sbin" "$to/lib/pkgconfig" "$to/include/locks" "$to/share/man/man1" "$to/share/man/man3" \
    "$to/share/man/man5" "$to/share/man/man8" "$to/share/doc/locksd" "$to/lib/systemd/system" "$to/lib/sysusers.d" \
    "$destdir/etc/locksd/locksd.conf.d"
install -m 755 "$build/locksd" "$to/sbin/"
install -m 755 "$build/locks-replay" "$build/locksctl" "$build/locks-bench" "$to/bin/"
install -m 644 clients/locks.h clients/locks_device.cuh shm_protocol/locks_abi.h "$to/include/locks/"
install -m 644 "$build/liblocks.a" "$to/lib/"
install -m 755 "$build/liblocks.so.$abi" "$to/lib/"
ln -sf "liblocks.so.$abi" "$to/lib/liblocks.so"
sed -e "s|@PREFIX@|$prefix|g" -e "s|@VERSION@|$version|g" clients/lib/liblocks.pc.in >"$to/lib/pkgconfig/liblocks.pc"
for page in packaging/man/*.[1-8]; do install -m 644 "$page" "$to/share/man/man${page##*.}/"; done
install -m 644 README.md DECISIONS.md LICENSE clients/examples/hello.c "$to/share/doc/locksd/"
for unit in packaging/*.service packaging/*.socket; do
    sed "s|@PREFIX@|$prefix|g" "$unit" >"$to/lib/systemd/system/${unit##*/}"
done
install -m 644 packaging/locksd.sysusers "$to/lib/sysusers.d/locksd.conf"
[ -e "$destdir/etc/locksd/locksd.conf" ] || install -m 644 packaging/locksd.conf "$destdir/etc/locksd/"
