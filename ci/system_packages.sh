#!/usr/bin/env bash
# Installs the programs and libraries that tests use beside Python packages, where that is possible:
# as root, with apt-get. Without one of them its tests are skipped, and say so.
set -euo pipefail
LIMIT_S=300

declare -A packages=(
    [chromium]="the documentation site is not looked at in a browser"
    [redis-server]="stores are tested in files only"
    [prometheus]="alerts and what scrapes metrics are not tested"
)
is_here() { command -v "$1" >/dev/null; }
missing=()
for package in "${!packages[@]}"; do
    is_here "$package" || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "system: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # Tests start servers of their own: no service of the machine's is started by the packages.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ] && [ -w "${policy%/*}" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    timeout "$LIMIT_S" bash -c \
        'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' _ "${missing[@]}" \
        </dev/null >/dev/null 2>&1 || true
fi
for package in "${missing[@]}"; do
    is_here "$package" ||
        echo "system: no $package here: ${packages[$package]} (apt-get install $package)" >&2
done
