#!/usr/bin/env bash
# From a fresh clone to a trained model: install, prepare text, pretrain a small GPT in FP16.
#
#   launch/quickstart.sh [section.key=value ...]
#
# Two ranks on a CPU, one rank per GPU where torch can use GPUs. The result lies in runs/quickstart, with its pictures.
# Ctrl-C ends it: the same command then begins anew.
#   MEGAMIX_PYTHON   an interpreter that already has torch: used as it is, nothing is installed
#   NPROC_PER_NODE   another number of ranks
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# Of the configuration as it is, which reached 3.50: docs/benchmarks.md, The quickstart. --full checks it.
expected="3.4 to 3.6"

say_interrupted() {
  say "interrupted; ./launch/quickstart.sh would start anew"
  exit 130
}
trap say_interrupted INT

say "quickstart, in 3 stages: install, text, training; 3 to 10 minutes the first time, 2 or 3 after that"
say "1/3 install: 1 to 5 minutes the first time, then nothing to do; a first look at torch takes up to a minute more"
config=configs/quickstart.toml
run_folder=runs/quickstart
ensure_python all torch numpy pydantic safetensors psutil tokenizers
cd "$ROOT" # the configuration's paths start here

machine="$(probe_machine)"
read -r gpus torch_version <<<"$machine"
if [[ "$gpus" == 0 ]]; then
  export NPROC_PER_NODE="${NPROC_PER_NODE:-2}"
  seen="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  if [[ "$seen" != 0 ]]; then
    say "nvidia-smi shows $seen GPU(s), but torch $torch_version cannot use any (a build for CPUs," \
      "or too old a driver): training on the CPU"
  fi
fi
ranks="${NPROC_PER_NODE:-$gpus}"
if [[ "$ranks" =~ ^[0-9]+$ ]] && ((ranks > 2)); then
  # The file's global batch feeds two ranks. In front: an override of the user's comes later and wins.
  set -- "training.global_batch_size=$((8 * ranks))" "$@"
fi

# Before anything is written or moved: is what we were given right, and where does it want to go?
effective="$("$PYTHON" -m megamix config "$config" "$@" --show)"
say "2/3 text: the Python standard library's own, tokenized into runs/data/stdlib; half a minute, then nothing to do"
"$PYTHON" -m megamix prepare --corpus stdlib --output runs/data/stdlib --vocab-size 2048 --valid-fraction 0.05
if [[ -e "$run_folder" ]] && grep -qFx "folder = \"$run_folder\"" <<<"$effective"; then
  number=1
  while [[ -e "$run_folder.$number" ]]; do number=$((number + 1)); done
  mv -- "$run_folder" "$run_folder.$number"
  say "the earlier $run_folder is now $run_folder.$number"
fi
say "3/3 training: the first line of the log in 10 to 60 seconds, the last one 2 to 3 minutes later on two cores"
status=0
launch/pretrain.sh "$config" "$@" || status=$?
[[ "$status" != 75 ]] || say_interrupted
[[ "$status" == 0 ]] || exit "$status"

folder="$(sed -n 's/^folder = "\(.*\)"$/\1/p' <<<"$effective")"
reached="$(sed -n 's/.*"valid\/loss": \([0-9.]*\).*/\1/p' "$folder/metrics.jsonl" 2>/dev/null | tail -n 1 || true)"
if [[ -n "$reached" ]]; then
  expect="expect $expected"
  [[ $# == 0 ]] || expect="$expect without your settings"
  LC_ALL=C printf 'reached: validation %.2f nats a token; %s\n' "$reached" "$expect"
fi
say "the run's page:"
at_work "drawing" "$PYTHON" -m megamix report "$folder" || say "no pictures: see above"
megamix=".venv/bin/megamix"
[[ -z "${MEGAMIX_PYTHON:-}" ]] || megamix="$PYTHON -m megamix"
printf '%s\n' "next:" \
  "  $megamix generate $folder --prompt def --temperature 0.5 --top-p 0.9" \
  "  NPROC_PER_NODE=2 ./launch/pretrain.sh configs/quickstart_adamw.toml    # AdamW instead of Muon" \
  "  $megamix prepare --input MY_TEXTS/ --output runs/data/mine --vocab-size 4096    # then docs/start_to_end.md"
