#!/usr/bin/env bash
# Makes .venv-llmcompressor for this machine: llmcompressor, which quantizes weights, in an environment of its own. Safe to interrupt and to run again.
# usage: env/llmcompressor.sh [--plan]      --plan prints the decisions and changes nothing. docs/environment.md explains them.
set -euo pipefail
cd "$(dirname "$0")/.."
. env/common.sh

venv=.venv-llmcompressor

choose_torch() {
  case "${KV_CALIBRATE_ENGINE:-auto}" in
    cuda) torch=cuda ;;
    cpu | none) torch=cpu ;;
    auto) if has_gpu; then torch=cuda; else torch=cpu; fi ;;
    *) fail "KV_CALIBRATE_ENGINE=$KV_CALIBRATE_ENGINE: choose cpu, cuda, none or auto" ;;
  esac
  packages=(--requirement env/llmcompressor.txt)
  if [ "$torch" = cpu ] && has_cpu_wheels; then
    packages+=(--constraints env/cpu-constraints.txt --overrides env/cpu-overrides.txt)
    if wants_torch_index; then packages+=(--torch-backend=cpu); fi
  fi
}

choose_python
choose_torch
if [ "${1:-}" = --plan ]; then
  printf 'torch: %s\npython: %s\nuv pip install %s\n' "$torch" "$python" "${packages[*]}"
  exit 0
fi

find_uv
# As in env/setup.sh: .unfinished lasts from the first change to the last, and a killed run's leftover starts over from uv's cache.
if [ -e $venv/.unfinished ] || ! fits $venv/bin/python || [ "$(cat $venv/.torch 2>/dev/null)" != "$torch" ]; then
  "$uv" venv --quiet --clear --python "$python" $venv
fi
touch $venv/.unfinished
rm -f $venv/.ready
say "installing llmcompressor into $venv (torch: $torch)"
"$uv" pip install --python $venv/bin/python "${packages[@]}"
printf '%s\n' "$torch" >$venv/.torch
rm $venv/.unfinished
touch $venv/.ready
