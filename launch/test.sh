#!/usr/bin/env bash
# Install (once), then every check: ruff, mypy and the tests.
#
#   launch/test.sh [--install-only] [--changed] [--full] [--coverage] [--oldest] [pytest arguments]
#
#   --install-only   stop after the install
#   --changed        the tests that a change since main can reach by imports, the nearest first, for three minutes
#   --full           the large counts of the tests as well (MEGAMIX_FULL=1)
#   --coverage       count the lines that tests run, too, which takes longer; less than 95 % fails
#   --oldest         instead of all that, a handful of tests with the oldest torch allowed, in the CUDA build of PyPI and
#                    on Python 3.12, as GPU images have them; in .venv-oldest (6 GB), 10 minutes at most on two cores
#   pytest arguments choose tests; coverage is then shown but not judged, and ruff and mypy still run
#
# mypy works beside the tests. What it says comes last, with the seconds of each part and the ten slowest tests.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# The tests of --oldest: what the package asks of torch.
handful=(
  tests/mixed_precision/test_engine.py tests/mixed_precision/test_compiled_update.py
  tests/comm/test_collectives.py tests/distributed/test_equals_reference.py tests/distributed/test_shard.py
  tests/model/test_compiled.py tests/model/test_recompute.py tests/model/test_fp8.py tests/model/test_borders.py
  tests/distributed/test_pipeline.py tests/parallel/test_tensor_parallel.py tests/parallel/test_fp8.py
  tests/train/test_job.py tests/train/test_resume.py tests/tools/verify/layouts/test_layouts.py
)

install_only=0
counts_lines=0
changed=0
oldest=0
while true; do
  case "${1:-}" in
    --install-only) install_only=1 ;;
    --changed) changed=1 ;;
    --full) export MEGAMIX_FULL=1 ;;
    --coverage) counts_lines=1 ;;
    --oldest) oldest=1 ;;
    *) break ;;
  esac
  shift
done

[[ "$oldest" == 0 ]] || use_oldest_torch
ensure_python all,dev torch numpy pydantic safetensors psutil tokenizers pytest
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

unset PYTHONDONTWRITEBYTECODE # else each of some hundred processes would compile the package anew
# Two processes share the work, and what is left goes to who is done first.
processes=()
if has_tool xdist; then
  processes=(-n 2 --dist worksteal)
fi
if [[ "$oldest" == 1 ]]; then
  [[ $# != 0 ]] || set -- "${handful[@]}"
  "$PYTHON" -m pytest ${processes[@]+"${processes[@]}"} "$@"
  exit
fi

installed=$SECONDS
if has_tool ruff; then
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
fi
parts="install $installed s, ruff $((SECONDS - installed)) s"
reached=()
if [[ "$changed" == 1 ]]; then
  listed="$("$PYTHON" -m tests.changed)"
  IFS=$'\n' read -r -d '' -a reached <<<"$listed" || true
fi
mypy=""
if has_tool mypy; then
  types="$(mktemp)"
  trap 'kill $(jobs -p) 2>/dev/null || true; rm -f -- "$types"' EXIT
  (
    began=$SECONDS status=0
    "$PYTHON" -m mypy || status=$?
    echo "mypy: $((SECONDS - began)) s beside the tests"
    exit "$status"
  ) >"$types" 2>&1 &
  mypy=$!
fi
began=$SECONDS
status=0
# A handful first, as on a CPU without arithmetic in halves, unless this is one.
has_halves='import sys; from megamix.base.machine import half_units; sys.exit(not half_units())'
if [[ $# == 0 && "$changed" == 0 && -z "${MEGAMIX_CPU_HALVES:-}" ]] && "$PYTHON" -c "$has_halves"; then
  # shellcheck disable=SC2046 # names of tests have no spaces
  MEGAMIX_CPU_HALVES=wide "$PYTHON" -m pytest ${processes[@]+"${processes[@]}"} -m also_wide \
    $(grep -rl --include='test_*.py' also_wide tests) || status=$?
fi
pytest=(-m pytest ${processes[@]+"${processes[@]}"} --durations=10)
if [[ "$changed" == 1 ]]; then
  # In the order given, for which one process must not begin in the middle.
  [[ ${#processes[@]} == 0 ]] || pytest+=(--dist load --maxschedchunk 1)
  [[ ${#reached[@]} == 0 ]] || "$PYTHON" "${pytest[@]}" --seconds 140 ${reached[@]+"${reached[@]}"} "$@" || status=$?
  say "a change since main reaches ${#reached[@]} files of tests; SKIPPED above are those that the time did not reach"
elif [[ "$counts_lines" == 1 ]] && has_tool coverage; then
  judged=()
  [[ $# != 0 ]] || judged=(--fail-under=95)
  "$PYTHON" -m coverage erase # what an earlier run left would count as covered
  { "$PYTHON" -m coverage run "${pytest[@]}" "$@" &&
    "$PYTHON" -m coverage combine --quiet &&
    "$PYTHON" -m coverage report ${judged[@]+"${judged[@]}"}; } || status=$?
else
  "$PYTHON" "${pytest[@]}" "$@" || status=$?
fi
parts+=", tests $((SECONDS - began)) s"
if [[ -n "$mypy" ]]; then
  wait "$mypy" || status=$?
  cat -- "$types"
fi
say "$parts"
exit "$status"
