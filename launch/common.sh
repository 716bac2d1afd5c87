# Sourced by the other scripts of this folder, not run: finds or makes the Python that everything runs with.
#
#   MEGAMIX_PYTHON   an interpreter that already has the dependencies: used as it is, nothing is installed
# shellcheck shell=bash

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
# Where everything is installed, with which versions, by which of the Pythons on PATH: use_oldest_torch has others.
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/constraints.txt"
PYTHONS=(python3 python3.14 python3.13 python3.12 python3.11)

say() { printf '%s\n' "$*" >&2; }

die() {
  say "${0##*/}: $*"
  exit 2
}

# $1: what is done; the rest: the command that does it. Says how long it is at work, every 4 s in a log, and each
# second on a terminal: nobody should wait without a word.
at_work() {
  local what="$1" status=0 clock
  shift
  tell_seconds "$what" &
  clock=$!
  "$@" || status=$?
  kill "$clock" 2>/dev/null || true
  wait "$clock" 2>/dev/null || true
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
  return "$status"
}

# Ends with this script: a background process is sent no Ctrl-C.
tell_seconds() {
  local what="$1" seconds=0
  while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null && ! has_ended; do
    seconds=$((seconds + 1))
    if [[ -t 2 ]]; then
      printf '\r%s: %d s' "$what" "$seconds" >&2
    elif ((seconds % 4 == 0)); then
      say "$what: $seconds s"
    fi
  done
}

# True if this script has ended and nobody has waited for that yet. macOS has no /proc, a small container no ps.
has_ended() {
  { cat "/proc/$$/stat" || ps -o stat= -p $$; } 2>/dev/null | grep -Eq '^Z|\) Z '
}

# -h or --help: prints the first comment of the script that was called, and does nothing.
for argument in "$@"; do
  if [[ "$argument" == -h || "$argument" == --help ]]; then
    while IFS= read -r line && [[ "$line" == "#"* ]]; do
      line="${line#\#}"
      [[ "$line" == "!"* ]] || printf '%s\n' "${line# }"
    done <"$0"
    exit 0
  fi
done

# Sets PYTHON to MEGAMIX_PYTHON, after a look whether it has the modules named as arguments.
use_megamix_python() {
  PYTHON="$(command -v -- "$MEGAMIX_PYTHON")" ||
    die "MEGAMIX_PYTHON: got $MEGAMIX_PYTHON, there is no such program; name an interpreter or unset it"
  [[ "$PYTHON" == /* ]] || PYTHON="$PWD/$PYTHON"
  export MEGAMIX_PYTHON="$PYTHON" # a script called by this one may stand in another folder
  local missing
  missing="$(missing_modules "$@")" && [[ "$missing" == lacks* ]] ||
    die "MEGAMIX_PYTHON: got $MEGAMIX_PYTHON, it is no Python >= 3.11; name another interpreter or unset it"
  [[ "$missing" == lacks ]] ||
    die "MEGAMIX_PYTHON: got $MEGAMIX_PYTHON, it cannot import:${missing#lacks}; install that there, or unset MEGAMIX_PYTHON"
  # Nothing is installed there, megamix neither.
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# Prints "lacks" and those of the named modules that $PYTHON has not; fails if it is too old. The word shows that Python
# has answered: any program may end with 0. Imports none: torch takes seconds.
missing_modules() {
  "$PYTHON" - "$@" <<'PY'
import sys
from importlib.util import find_spec
assert sys.version_info >= (3, 11)
print("lacks", *(name for name in sys.argv[1:] if find_spec(name) is None), end="")
PY
}

# Prints the first of $PYTHONS on PATH that is new enough and can make virtual environments.
find_python() {
  local name
  for name in "${PYTHONS[@]}"; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  name="${PYTHONS[0]}"
  die "no Python >= 3.11 with the venv module on PATH (tried ${PYTHONS[*]});" \
    "install one (Debian and Ubuntu: apt install $name $name-venv), or name one with torch in MEGAMIX_PYTHON"
}

# What the environment was installed from: it must be renewed when any of this changes. The path counts because an
# environment that was moved with its repository still points to the old place.
install_stamp() { { printf '%s\n' "$ROOT"; cat "$ROOT/pyproject.toml" "$CONSTRAINTS"; } | cksum; }

# Lets ensure_python make an environment beside the usual one, with the oldest torch that pyproject.toml allows.
use_oldest_torch() {
  VENV="$ROOT/.venv-oldest" CONSTRAINTS="$(mktemp)" PYTHONS=(python3.12)
  trap 'rm -f -- "$CONSTRAINTS"' EXIT
  # torch 2.11 wants an older setuptools than the usual pin.
  sed -n 's/.*"torch>=\([0-9.]*\)".*/torch==\1.0/p' "$ROOT/pyproject.toml" >"$CONSTRAINTS"
  grep -v -e '^torch==' -e '^setuptools==' "$ROOT/constraints.txt" >>"$CONSTRAINTS"
}

# Sets PYTHON to an interpreter that can run megamix, installing it first where needed.
# $1: the extras, "all" or "all,dev"; the rest: modules that a MEGAMIX_PYTHON must have.
ensure_python() {
  local extras="$1"
  shift
  if [[ -n "${MEGAMIX_PYTHON:-}" ]]; then
    use_megamix_python "$@"
    say "using $PYTHON as it is"
    return
  fi
  PYTHON="$VENV/bin/python"
  local stamp have=""
  stamp="$(install_stamp)"
  for have in all all,dev; do
    # "all,dev" holds everything that "all" does.
    [[ "$have" == "$extras" || "$extras" == all ]] || continue
    if [[ "$(cat "$VENV/.megamix-$have" 2>/dev/null)" == "$stamp" ]] && "$PYTHON" -c '' 2>/dev/null; then
      return
    fi
  done
  install_megamix "$extras" "$stamp"
}

install_megamix() {
  local extras="$1" stamp="$2" python torch started=$SECONDS
  python="$(find_python)" || exit
  torch="$(grep -m 1 '^torch==' "$CONSTRAINTS")"
  # .megamix-unfinished lies in the environment while it is being changed. Found here, an install was cut short, and the
  # environment may hold half a package that pip takes for a whole one.
  if [[ -e "$VENV/.megamix-unfinished" ]]; then
    say "$VENV is unfinished; installing it again"
    rm -rf -- "$VENV"
  elif ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    if compgen -G "$VENV/.megamix-*" >/dev/null; then
      say "$VENV no longer works; installing it again"
      rm -rf -- "$VENV"
    elif [[ -e "$VENV" ]]; then
      die "$VENV was not made by this script and has no working pip; move it away, or name its Python in MEGAMIX_PYTHON"
    fi
  fi
  mkdir -p -- "$VENV"
  : >"$VENV/.megamix-unfinished"
  rm -f -- "$VENV/.megamix-all" "$VENV/.megamix-all,dev"
  say "installing into $VENV with $("$python" --version) (once; a few minutes, mostly $torch)"
  [[ -x "$PYTHON" ]] || at_work "making $VENV" "$python" -m venv "$VENV"
  local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check)
  [[ "$extras" != *dev* ]] || pip+=(--no-compile) # the tests import a tenth of it: that is compiled then
  say "1 of 2: $torch, the longest part; its packages are downloaded unless pip has them"
  # torch first, by its exact version: left to a range, pip may choose a newer build for other hardware.
  at_work "installing $torch" "${pip[@]}" -c "$CONSTRAINTS" "$torch"
  say "2 of 2: megamix and what else it needs"
  (cd "$ROOT" && at_work "installing megamix" "${pip[@]}" -c "$CONSTRAINTS" -e ".[$extras]")
  if [[ "$extras" == *dev* ]]; then
    # For the tests of a GPU's code, in a folder of its own: every process that compiles for the CPU would import it.
    at_work "installing triton" "${pip[@]}" --no-deps --upgrade --target "$VENV/triton" \
      "$(grep -m 1 -o 'triton==[0-9.]*' "$ROOT/pyproject.toml")"
  fi
  printf '%s\n' "$stamp" >"$VENV/.megamix-$extras"
  rm -f -- "$VENV/.megamix-unfinished"
  say "installed in $((SECONDS - started)) s"
}

# Sets PYTHON to what is there; never installs, because many nodes may start at once on one file system.
find_installed_python() {
  if [[ -n "${MEGAMIX_PYTHON:-}" ]]; then
    use_megamix_python "$@"
  elif [[ -e "$VENV/.megamix-all" || -e "$VENV/.megamix-all,dev" ]]; then
    PYTHON="$VENV/bin/python"
  else
    die "nothing is installed in $VENV; run ./launch/install.sh first," \
      "or name an interpreter that has torch in MEGAMIX_PYTHON"
  fi
}

# Prints the number of GPUs that torch can use, and torch's version.
probe_machine() {
  at_work "loading torch" "$PYTHON" - <<'PY' || die "${MEGAMIX_PYTHON:+MEGAMIX_PYTHON: }got $PYTHON, it cannot import: torch; install that there, or name another"
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads needs no traceback
try:
    import torch
except ImportError as error:
    sys.exit(f"torch: {error}")
print(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.__version__)
PY
}
