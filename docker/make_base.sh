#!/bin/sh
# Writes a minimal Debian root file system as a tar archive, where no image registry is reachable.
# Usage: make_base.sh SUITE ARCHIVE [MIRROR]      (needs root and debootstrap)
set -eu
suite=$1
archive=$2
mirror=${3:-}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# shellcheck disable=SC2086  # an empty mirror means debootstrap's own default
debootstrap --variant=minbase "$suite" "$root/base" $mirror >&2
rm -rf "$root/base/var/cache/apt/archives" "$root/base/var/lib/apt/lists"
mkdir -p "$root/base/var/cache/apt/archives/partial" "$root/base/var/lib/apt/lists/partial"
tar -C "$root/base" -c -f "$archive" .
