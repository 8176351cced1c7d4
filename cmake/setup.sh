#!/usr/bin/env bash
# Sets up what the build and the tests need, and says what it does. Idempotent: a second call takes a moment.
#
#   TORCH_VERSION   torch to install (default 2.15.0)
#   REEF_PYTHON     an interpreter that already has torch: used as it is, through a virtual environment on top of it
#   REEF_CACHE      where virtual environments are kept, one per torch version (default ~/.cache/reef), so that several
#                   checkouts share the 5 GB of one torch
#
# Leaves .venv, a link to the environment in use.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

TORCH_VERSION=${TORCH_VERSION:-2.15.0}
CACHE=${REEF_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/reef}
PYTHON_PACKAGES=(cmake==4.* ninja numpy pytest hypothesis tqdm scikit-build-core transformers==5.* accelerate lightning==2.*)
DEBIAN_PACKAGES=(g++ git ccache libgtest-dev libboost1.81-dev libboost-program-options1.81-dev libxxhash-dev
                 liburing-dev clang-format)

# ---- Debian packages ------------------------------------------------------------------------------------------------
if command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${DEBIAN_PACKAGES[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing+=("$package")
  done
  interpreter=${REEF_PYTHON:-python3}
  if ! "$interpreter" -c 'import ensurepip, venv' 2>/dev/null; then missing+=(python3-venv); fi
  if [ ${#missing[@]} -gt 0 ]; then
    line="apt-get install --yes --no-install-recommends ${missing[*]}"
    [ "$(id -u)" = 0 ] || fail "these Debian packages are missing; run this once, then try again:
  sudo apt-get update && sudo $line"
    say "Debian packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get install --yes --no-install-recommends "${missing[@]}" >/dev/null
  fi
else
  say "not Debian: expecting g++ 12, GoogleTest, Boost 1.75 or newer with program_options to be installed"
fi

# ---- virtual environment --------------------------------------------------------------------------------------------
INTERPRETER=${REEF_PYTHON:-python3}
command -v "$INTERPRETER" >/dev/null || fail "there is no interpreter '$INTERPRETER'; install Python 3.10 or newer, or set REEF_PYTHON"
"$INTERPRETER" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$INTERPRETER is older than Python 3.10, the oldest that torch supports; set REEF_PYTHON to a newer one"
TAG=$("$INTERPRETER" -c 'import sys; print(f"py{sys.version_info[0]}{sys.version_info[1]}")')
if [ -n "${REEF_PYTHON:-}" ]; then
  "$INTERPRETER" -c 'import torch' 2>/dev/null || fail "REEF_PYTHON=$REEF_PYTHON cannot import torch; unset it and setup installs torch by itself"
  ENVIRONMENT=$CACHE/on-$(printf '%s' "$(command -v "$INTERPRETER")" | cksum | cut -d' ' -f1)-$TAG
  VENV_OPTIONS=(--system-site-packages)
  WANTED=("${PYTHON_PACKAGES[@]}")
else
  ENVIRONMENT=$CACHE/torch-$TORCH_VERSION-$TAG
  VENV_OPTIONS=()
  WANTED=("torch==$TORCH_VERSION" "${PYTHON_PACKAGES[@]}")
fi
STAMP=$ENVIRONMENT/reef-setup
if [ "$(cat "$STAMP" 2>/dev/null)" != "${WANTED[*]}" ]; then
  mkdir -p "$CACHE"
  exec 9>"$CACHE/lock"
  flock 9 # two checkouts may set up at once
  say "virtual environment $ENVIRONMENT"
  [ -x "$ENVIRONMENT/bin/python" ] || "$INTERPRETER" -m venv "${VENV_OPTIONS[@]}" "$ENVIRONMENT"
  say "Python packages: ${WANTED[*]} (torch with its CUDA libraries is about 5 GB)"
  "$ENVIRONMENT/bin/python" -m pip install --quiet --disable-pip-version-check "${WANTED[@]}"
  printf '%s' "${WANTED[*]}" >"$STAMP"
fi
ln -sfn "$ENVIRONMENT" .venv
say "$("$ENVIRONMENT/bin/python" -c 'import importlib.metadata as m, sys; print("Python", sys.version.split()[0] + ", torch", m.version("torch"))')"
