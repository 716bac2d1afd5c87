#!/usr/bin/env bash
# Install megamix into .venv, once, for whoever trains with it; launch/test.sh is for whoever changes it.
#
#   launch/install.sh [EXTRA ...]
#
#   EXTRA   also this: transformers, datasets, wandb, harness. pyproject.toml lists all extras; `all` has the usual ones
#
# With torch for this machine's CUDA already in an environment of yours: pip install -e '.[all]' there, or MEGAMIX_PYTHON.
#   MEGAMIX_PYTHON   an interpreter that already has the dependencies: looked at, nothing is installed
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

ensure_python all torch numpy pydantic safetensors psutil tokenizers
for extra in "$@"; do
  [[ -z "${MEGAMIX_PYTHON:-}" ]] || die "$extra: nothing is installed for MEGAMIX_PYTHON; install it there, or unset that"
  grep -q "^$extra = \[" "$ROOT/pyproject.toml" || die "$extra: is no extra of pyproject.toml; write launch/install.sh transformers"
  (cd -- "$ROOT" && at_work "installing $extra" \
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$CONSTRAINTS" -e ".[$extra]")
done
[[ -n "${MEGAMIX_PYTHON:-}" ]] || say "installed in $VENV; \`. .venv/bin/activate\` puts megamix on PATH"
