#!/usr/bin/env bash
# Finds a Chromium for the tests of `slipstream view`, or installs the distribution's. Quick when there is one.
set -euo pipefail
for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then exit 0; fi
done
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }
advice="the tests of slipstream view need Chromium: install your system's chromium package, then run this again"
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$advice"
printf '\033[1m[setup]\033[0m installing chromium\n'
apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 ||
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || fail "$advice"
