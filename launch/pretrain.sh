#!/usr/bin/env bash
# Train by a configuration, with one process per GPU, on one machine or many.
#
#   launch/pretrain.sh CONFIG [section.key=value ...]
#
#   NPROC_PER_NODE   ranks on this machine; default: the number of GPUs torch can use, or 1
#   NNODES           machines; run this script on each of them; default 1
#   RDZV_ENDPOINT    host:port of one of them, the same everywhere; needed when NNODES > 1
#   RDZV_ID          a name for the job, the same everywhere; default megamix
#   OMP_NUM_THREADS  threads of each rank; default: the cores divided by the ranks
#   MEGAMIX_PYTHON   an interpreter that has torch, used instead of .venv
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

[[ $# -ge 1 ]] || die "CONFIG is missing; write launch/pretrain.sh CONFIG [section.key=value ...]"
nnodes="${NNODES:-1}"
[[ "$nnodes" =~ ^[1-9][0-9]*$ ]] || die "NNODES: got $nnodes, must be 1 or more; write NNODES=2"
if [[ "$nnodes" != 1 && -z "${RDZV_ENDPOINT:-}" ]]; then
  die "RDZV_ENDPOINT: missing with NNODES=$nnodes; set it to host:port of one node, the same on all, e.g. node0:29500"
fi
find_installed_python torch numpy pydantic safetensors
# A mistake in the configuration is reported at once: finding out what torch can use takes seconds.
"$PYTHON" -m megamix config "$@" --show >/dev/null
machine="$(probe_machine)"
read -r gpus cores keep _ <<<"$machine"
ranks="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE: got $ranks, must be 1 or more; write NPROC_PER_NODE=2"
# So are mistakes in files and numbers of ranks, before any rank starts. No node is ahead of the others: the run's
# folder is claimed only when all ranks have met. What is said of keys that are dropped the run says again.
WORLD_SIZE=$((nnodes * ranks)) "$PYTHON" -m megamix train "$@" --check >/dev/null
# More threads than cores make the ranks wait for each other's threads: two ranks with two threads each on two
# cores reached 30 % of the speed of two ranks with one thread each.
threads=$((cores / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
if [[ "$gpus" == 0 && "$keep" != 0 ]]; then
  # glibc gives a large block back to the system as soon as it is freed, and the next step pays for mapping and zeroing
  # the same pages again. Told to keep them, training on a CPU gains 8 to 10 % tokens/s. The three belong together:
  # setting any one ends glibc's own adjustment of the others.
  export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-$keep}"      # larger blocks get a mapping of their own
  export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-4294967296}" # free bytes at the top that are kept
  export MALLOC_TOP_PAD_="${MALLOC_TOP_PAD_:-268435456}"                # bytes fetched beyond what is needed
fi

if [[ "$nnodes" == 1 ]]; then
  rendezvous=(--standalone)
else
  rendezvous=(--nnodes="$nnodes" --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-megamix}")
fi
# torchrun as a module: the program of that name on PATH may belong to another Python. Ours ends with the ranks' status.
exec "$PYTHON" -m megamix.train.launch "${rendezvous[@]}" --nproc-per-node="$ranks" -m megamix train "$@"
