#!/usr/bin/env bash
# Makes .venv from the locked pins, for the machine it runs on. Quick when nothing changed. Every package is compared with the hashes of the
# lock before it is installed.
#
#   requirements/setup.sh            CPU packages, or GPU packages when nvidia-smi finds a GPU
#   SLIPSTREAM_TARGET=cpu|gpu        decides instead of the machine
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

target=${SLIPSTREAM_TARGET:-}
if [ -z "$target" ]; then target=cpu; nvidia-smi -L 2>/dev/null | grep -q GPU && target=gpu; fi
[ "$target" = cpu ] || [ "$target" = gpu ] || fail "SLIPSTREAM_TARGET must be cpu or gpu, got '$target'"
lock=requirements/$target.lock
stamp=$(cat "$lock" requirements/uv.lock pyproject.toml requirements/setup.sh | sha256sum | cut -c1-16)-$target

# What Mooncake's engine links, also where it speaks TCP -> Debian's package of it.
declare -A package_of=([libibverbs.so.1]=libibverbs1 [libmlx5.so.1]=ibverbs-providers [libnuma.so.1]=libnuma1 [libcurl.so.4]=libcurl4)

# Of these, what is not here. The driver of GPUs (libcuda.so.1) comes with them, and not from here.
missing_libraries() { ldd .venv/lib/python3*/site-packages/mooncake/engine*.so 2>/dev/null | awk '/not found/ && !/libcuda\.so/ { print $1 }' | sort -u; }

# With root they are installed; without, they are unpacked where the engine looks first: beside the libraries of its wheel.
install_libraries() {
  mapfile -t missing < <(missing_libraries)
  [ ${#missing[@]} != 0 ] || return 0
  names=(); for library in "${missing[@]}"; do names+=("${package_of[$library]:-$library}"); done
  cure="install your system's packages of it (Debian: ${names[*]}; elsewhere rdma-core, numactl, libcurl), then run this again"
  command -v apt-get >/dev/null || fail "Mooncake needs ${missing[*]}: $cure"
  if [ "$(id -u)" = 0 ]; then
    say "installing ${names[*]}"
    apt-get install -y -qq --no-install-recommends "${names[@]}" >/dev/null 2>&1 ||
      { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${names[@]}" >/dev/null; } || fail "Mooncake needs ${missing[*]}: $cure"
  else
    say "unpacking ${names[*]} into .venv (no root)"
    work=$(mktemp -d)
    mapfile -t names < <(apt-get install -s --no-install-recommends "${names[@]}" | awk '/^Inst/ { print $2 }') # with what they need
    (cd "$work" && apt-get download -qq "${names[@]}") ||
      fail "could not download ${names[*]}; ask an administrator to run: apt-get install ${names[*]}"
    for deb in "$work"/*.deb; do dpkg -x "$deb" "$work/root"; done
    beside=(.venv/lib/python3*/site-packages/mooncake_transfer_engine*.libs)
    find "$work/root" -name '*.so*' -exec cp -P -t "${beside[0]}" {} +
    rm -rf "$work"
  fi
  mapfile -t missing < <(missing_libraries)
  [ ${#missing[@]} = 0 ] || fail "Mooncake needs ${missing[*]}: $cure"
}

# A virtual environment's scripts begin with the path that it was made at. One that was moved or copied with its checkout is made again; one
# that is linked from another checkout is used while it holds the same packages, and replaced, not written to, when it does not.
made_in=$(dirname "$(sed -n 's/^command = .* -m venv //p' .venv/pyvenv.cfg 2>/dev/null)")
is_own() { [ "$made_in" -ef . ]; }
is_linked() { [ -L .venv ] && [ "$made_in/.venv" -ef .venv ]; }

if { is_own || is_linked; } && [ "$(cat .venv/.slipstream-stamp 2>/dev/null)" = "$stamp" ]; then install_libraries; exit 0; fi

python=
candidates="python3.11 python3.12 python3"; [ "$target" = gpu ] && candidates="python3.12 python3.11 python3"
for candidate in $candidates; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
    python=$candidate; break
  fi
done
[ -n "$python" ] || fail "needs Python 3.11 or 3.12 on PATH, with its venv module (Debian 12: apt-get install python3.11-venv; Ubuntu 24.04: python3.12-venv; a cluster: module load python)"
say "$target environment with $($python --version) from $lock ($(grep -c '^[a-zA-Z0-9].*==' "$lock") packages, about a minute)"

if is_own && .venv/bin/python -m pip --version >/dev/null 2>&1 && [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ]; then :; else
  rm -rf .venv; "$python" -m venv .venv
fi
rm -f .venv/.slipstream-stamp
.venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.lock 2>&1 | grep -v WARNING || true
[ -x .venv/bin/uv ] || fail "could not install uv from the package index; is it reachable?"

# pip's own find-links (a local folder of wheels) come first. Without the lock's torch wheel there, PyTorch's CPU index is the source: that
# wheel alone is trusted to the index, which may serve another build of it, or one for another Python.
links=()
for place in $(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true); do links+=(--find-links "$place"); done
# Compiling takes two minutes of a core; with UV_COMPILE_BYTECODE=0, first imports compile what they read.
install() { UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1} .venv/bin/uv pip install -q --python .venv/bin/python --no-deps "$@"; }
log=$(mktemp)
if ! install --require-hashes "${links[@]}" -r "$lock" 2>"$log"; then
  [ "$target" = cpu ] || { cat "$log" >&2; fail "the packages of $lock could not be installed"; }
  torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")
  say "no wheel of $torch with the lock's hash near by: taking it from PyTorch's index, without a hash to compare"
  { install --require-hashes "${links[@]}" -r <(awk '/^[^ ]/ { is_torch = /^torch==/ } !is_torch' "$lock") &&
    install --index-url https://download.pytorch.org/whl/cpu "$torch"; } 2>"$log" ||
    { cat "$log" >&2; fail "the packages of $lock could not be installed"; }
fi
.venv/bin/uv pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e . 2>"$log" || { cat "$log" >&2; fail "could not install Slipstream itself"; }
rm -f "$log"
install_libraries
say "packages: .venv ($(du -sh .venv | cut -f1)). What slipstream doctor finds here:"
.venv/bin/slipstream doctor || fail "not ready: cure what doctor says above, then run this again"
echo "$stamp" >.venv/.slipstream-stamp
