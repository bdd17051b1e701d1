#!/usr/bin/env bash
# On a GPU host without package registries: unpack what lies in .gpu (one call for each transfer, in any order and as often as one likes).
# .gpu/vllm* are unpacked by their own script, .gpu/NAME-NN/chunk are the parts of a model file NAME, kept in /tmp/models/NAME.parts.
# usage: prepare.sh          then, once all is there: rebuild_models.py
set -euo pipefail
cd "$(dirname "$0")/../.."
for folder in .gpu/*/; do
  folder=${folder%/}
  done=/tmp/gpu/done/$(basename "$folder")
  if [ -e "$done" ]; then continue; fi  # brought by an earlier call
  mkdir -p /tmp/gpu/done
  if [ -f "$folder/unpack.sh" ]; then
    bash "$folder/unpack.sh"
  elif [ -f "$folder/chunk" ]; then
    name=$(basename "$folder")
    mkdir -p "/tmp/models/${name%-*}.parts"
    cp "$folder/chunk" "/tmp/models/${name%-*}.parts/${name##*-}"
  fi
  touch "$done"
done
ls -d /tmp/gpu/vllm/vllm/*.so /tmp/models/*.parts/* 2>/dev/null || true
