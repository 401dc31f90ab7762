#!/bin/sh
# SPDX-License-Identifier: MIT
# deps.sh [--name] GROUP... - install the Debian packages of the groups that are missing; say what to do where that cannot be
# done. --name: only name them and how to get them, exit 69.
set -eu

packages_of() {
    case "$1" in
    build) echo gcc libc6-dev make pkgconf libinih-dev libjansson-dev libnuma-dev libsystemd-dev ;;
    test) echo check g++ python3 python3-numpy systemd procps libc6-dbg man-db ;;
    lint) echo git clang-format clang-tidy cppcheck shellcheck ;;
    *) echo "deps.sh: unknown group '$1' (build, test, lint)" >&2; exit 64 ;;
    esac
}

name=
[ "${1:-}" != --name ] || { name=yes; shift; }
missing=
for group in "$@"; do
    for package in $(packages_of "$group"); do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
done
if [ -n "$name" ]; then
    echo "Something to build with is missing:${missing:- pkg-config finds none of what $* needs}" >&2
    echo "\`make demo\` and \`packaging/deps.sh $*\` install Debian's packages; elsewhere they are the headers of these libraries." >&2
    exit 69
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then as_root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root='sudo -n'
else
    echo "Missing Debian packages:$missing" >&2
    echo "You are not root and sudo asks for a password. Have an administrator run:" >&2
    echo "    apt-get install$missing" >&2
    exit 77
fi
echo "Installing Debian packages:$missing"
# shellcheck disable=SC2086 # words are meant to split
if ! { $as_root apt-get update -qq &&
       $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }; then
    echo "apt-get could not install:$missing" >&2
    echo "Is there a network, and a package source in /etc/apt? Install them by hand, then try again." >&2
    exit 69
fi
