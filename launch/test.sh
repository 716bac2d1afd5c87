#!/usr/bin/env bash
# Install (once), then every check: ruff, mypy and the tests.
#
#   launch/test.sh [--install-only] [--full] [--coverage] [pytest arguments]
#
#   --install-only   stop after the install
#   --full           the large counts of the tests as well (MEGAMIX_FULL=1)
#   --coverage       count the lines that tests run, too, half as long again; less than 95 % fails
#   pytest arguments choose tests; coverage is then shown but not judged, and ruff and mypy still run
#
# mypy works beside the tests, and what it says comes last.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

install_only=0
counts_lines=0
while true; do
  case "${1:-}" in
    --install-only) install_only=1 ;;
    --full) export MEGAMIX_FULL=1 ;;
    --coverage) counts_lines=1 ;;
    *) break ;;
  esac
  shift
done

ensure_python all,dev torch numpy pydantic safetensors tokenizers pytest
[[ -z "${MEGAMIX_PYTHON:-}" ]] || probe_machine >/dev/null # its torch may be there and not work
[[ "$install_only" == 0 ]] || exit 0
cd "$ROOT"

# True if the tool is there. Our own environment has every tool; a MEGAMIX_PYTHON may lack some, which is said.
has_tool() {
  if [[ -n "${MEGAMIX_PYTHON:-}" && "$(missing_modules "$1")" != lacks ]]; then
    say "$1 is left out: $PYTHON has none"
    return 1
  fi
}

if has_tool ruff; then
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
fi
mypy=""
if has_tool mypy; then
  types="$(mktemp)"
  trap 'kill $(jobs -p) 2>/dev/null || true; rm -f -- "$types"' EXIT
  "$PYTHON" -m mypy >"$types" 2>&1 &
  mypy=$!
fi
unset PYTHONDONTWRITEBYTECODE # else each of some hundred processes would compile the package anew
# Two processes share the work, and what is left goes to who is done first.
processes=()
if has_tool xdist; then
  processes=(-n 2 --dist worksteal)
fi
status=0
if [[ "$counts_lines" == 1 ]] && has_tool coverage; then
  judged=()
  [[ $# != 0 ]] || judged=(--fail-under=95)
  "$PYTHON" -m coverage erase # what an earlier run left would count as covered
  { "$PYTHON" -m coverage run -m pytest "${processes[@]}" "$@" &&
    "$PYTHON" -m coverage combine --quiet &&
    "$PYTHON" -m coverage report "${judged[@]}"; } || status=$?
else
  "$PYTHON" -m pytest "${processes[@]}" "$@" || status=$?
fi
# A handful of every promise again, as on a CPU without arithmetic in halves, unless this is one.
has_halves='import sys; from megamix.machine import half_units; sys.exit(not half_units())'
if [[ $# == 0 && -z "${MEGAMIX_CPU_HALVES:-}" ]] && "$PYTHON" -c "$has_halves"; then
  mapfile -t files < <(grep -rl --include='test_*.py' also_wide tests)
  MEGAMIX_CPU_HALVES=wide "$PYTHON" -m pytest "${processes[@]}" -m also_wide "${files[@]}" || status=$?
fi
if [[ -n "$mypy" ]]; then
  wait "$mypy" || status=$?
  cat -- "$types"
fi
exit "$status"
