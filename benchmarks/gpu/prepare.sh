#!/usr/bin/env bash
# On a GPU host without package registries: unpack what lies in .gpu (one call for each transfer, in any order and as often as one likes).
# .gpu/vllm* are unpacked by their own script, .gpu/NAME-NN/chunk are the parts of a model file NAME, kept in /tmp/models/NAME.parts.
# FlashAttention-2 comes in parts too (_vllm_fa2_C.abi3.so.xz-NN) and is unpacked once all of them, and vLLM's Python files, are there.
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
fa2=/tmp/gpu/vllm/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
if [ ! -e "$fa2" ] && [ -d "$(dirname "$fa2")" ] && ls /tmp/models/_vllm_fa2_C.abi3.so.xz.parts/* > /dev/null 2>&1; then
  # xz fails where a part is missing: then it is tried again when the next one has come
  if cat /tmp/models/_vllm_fa2_C.abi3.so.xz.parts/* | xz -dc -T0 > "$fa2.new" 2> /dev/null; then mv "$fa2.new" "$fa2"; else rm -f "$fa2.new"; fi
fi
ls -d "$fa2" 2> /dev/null || true
ls -d /tmp/gpu/vllm/vllm/*.so /tmp/models/*.parts/* 2>/dev/null || true
