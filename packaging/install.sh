#!/bin/sh
# SPDX-License-Identifier: MIT
# install.sh install|uninstall BUILD DESTDIR PREFIX VERSION ABI - what `make install` and `make uninstall` do.
#
# each_file() is the list of what belongs to an installation, for both. The configuration stays: that of another PREFIX is the same.
set -eu
verb=$1 build=$2 destdir=$3 prefix=$4 version=$5 abi=$6
to=$destdir$prefix
etc=$destdir/etc/locksd

stop() { echo "make $verb: $*" >&2; exit 1; }
case "$prefix" in
*[!A-Za-z0-9/._+-]*) stop "PREFIX=$prefix: letters, digits and /._+- only: it goes into units and into liblocks.pc" ;;
*/../* | */..) stop "PREFIX=$prefix leads out of DESTDIR: no '..' in it" ;;
/*) ;;
*) stop "PREFIX=$prefix is not an absolute path" ;;
esac
case "$destdir" in -*) stop "DESTDIR=$destdir begins with a dash: ./$destdir, or a whole path" ;; esac

may_write() { # may_write FOLDER: it or the one it would be made in
    at=$1
    while [ ! -e "$at" ]; do
        case $at in /*/*) at=${at%/*} ;; /*) at=/ ;; */*) at=${at%/*} ;; *) at=. ;; esac
    done
    [ -w "$at" ] || stop "$1 cannot be written: be root, or choose a folder of yours by PREFIX= (all but /etc) or DESTDIR= (all of it)"
}

# Calls put MODE SOURCE TARGET, or filled SOURCE TARGET (@PREFIX@ and @VERSION@ are replaced), for each file.
each_file() {
    put 755 "$build/locksd" "$to/sbin/locksd"
    for tool in locks-replay locksctl locks-bench; do put 755 "$build/$tool" "$to/bin/$tool"; done
    for header in clients/locks.h clients/locks_device.cuh shm_protocol/locks_abi.h; do
        put 644 "$header" "$to/include/locks/${header##*/}"
    done
    put 644 "$build/liblocks.a" "$to/lib/liblocks.a"
    put 755 "$build/liblocks.so.$abi" "$to/lib/liblocks.so.$abi"
    filled clients/lib/liblocks.pc.in "$to/lib/pkgconfig/liblocks.pc"
    for page in packaging/man/*.[1-8]; do put 644 "$page" "$to/share/man/man${page##*.}/${page##*/}"; done
    for text in README.md DECISIONS.md LICENSE clients/examples/hello.c; do put 644 "$text" "$to/share/doc/locksd/${text##*/}"; done
    for unit in packaging/*.service packaging/*.socket; do filled "$unit" "$to/lib/systemd/system/${unit##*/}"; done
    put 644 packaging/locksd.sysusers "$to/lib/sysusers.d/locksd.conf"
}

elsewhere() { # what nothing finds by itself
    echo "Nothing looks for units, libraries and manuals under $prefix by itself:"
    echo "    systemd-sysusers $prefix/lib/sysusers.d/locksd.conf"
    echo "    systemctl link $prefix/lib/systemd/system/locksd.socket $prefix/lib/systemd/system/locksd.service"
    echo "    echo $prefix/lib >/etc/ld.so.conf.d/locksd.conf && ldconfig"
    echo "    export PATH=\$PATH:$prefix/bin:$prefix/sbin MANPATH=:$prefix/share/man PKG_CONFIG_PATH=$prefix/lib/pkgconfig"
}

may_write "$to"
case $verb in
install)
    may_write "$etc"
    put() { install -D -m "$1" "$2" "$3"; }
    filled() { install -d "${2%/*}" && sed -e "s|@PREFIX@|$prefix|g" -e "s|@VERSION@|$version|g" "$1" >"$2" && chmod 644 "$2"; }
    each_file
    ln -sf "liblocks.so.$abi" "$to/lib/liblocks.so"
    install -d "$etc/locksd.conf.d"
    [ -e "$etc/locksd.conf" ] || install -m 644 packaging/locksd.conf "$etc/"
    case ${prefix%/} in /usr | /usr/local) ;; *) elsewhere ;; esac
    ;;
uninstall)
    put() { rm -f "$3"; }
    filled() { rm -f "$2"; }
    each_file
    rm -f "$to/lib/liblocks.so"
    for folder in "$to/include/locks" "$to/share/doc/locksd"; do
        if [ -d "$folder" ]; then rmdir "$folder" 2>/dev/null || echo "left, with what is in it: $folder"; fi
    done
    [ ! -d "$etc" ] || echo "left, since other installations read it too: $etc"
    ;;
*) stop 'install or uninstall' ;;
esac
