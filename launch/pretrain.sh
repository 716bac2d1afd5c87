#!/usr/bin/env bash
# Train by a configuration, with one process per GPU, on one machine or many.
#
#   launch/pretrain.sh CONFIG [section.key=value ...] [--check [--memory SIZE]]
#
#   --check          look for mistakes and say what these ranks would train; start nothing
#   --memory SIZE    what a rank may hold, as 3GiB: refuse more
#
#   NPROC_PER_NODE   ranks on this machine; default: the number of GPUs torch can use, or 1
#   NNODES           machines; run this script on each of them; default 1
#   NODE_RANK        this machine's number among them, 0 to NNODES - 1; needed when NNODES > 1
#   MASTER_ADDR      the name or address of machine 0, the same everywhere; needed when NNODES > 1
#   MASTER_PORT      a free port of machine 0, the same everywhere; default 29500
#   PET_...          the same five names with PET_ in front, as Kubeflow sets them: read where the plain one is not set; no others are
#   OMP_NUM_THREADS  threads of each rank; default: the cores divided by the ranks (megamix/base/machine.py)
#   MEGAMIX_PYTHON   an interpreter that has torch, used instead of .venv
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# A scheduler's signal to all processes, while this one still looks: nothing has begun. The launcher takes its own.
trap 'say "interrupted before any rank had started; the same command starts again"; exit 75' TERM USR1

check="" memory=() words=()
while (($#)); do
  case "$1" in
    --check) check=--check ;;
    --memory) memory=("--memory=${2-}") && shift $(($# > 1)) ;;
    --memory=*) memory=("$1") ;;
    *) words+=("$1") ;;
  esac
  shift
done
set -- ${words[@]+"${words[@]}"}
[[ -n "$check" || -z "${memory[*]-}" ]] || die "${memory[*]-}: is read with --check; write --check ${memory[*]-}"
[[ $# -ge 1 ]] || die "CONFIG is missing; write launch/pretrain.sh CONFIG [section.key=value ...]"
for name in NPROC_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
  theirs="PET_$name"
  [[ "${!name:-}" || -z "${!theirs:-}" || "${!theirs}" =~ ^(auto|gpu|cpu)$ ]] || export "$name=${!theirs}"
done
# torchrun itself reads all PET_ names, so that PET_RDZV_BACKEND would choose a rendezvous that unpickles what it is sent.
for theirs in ${!PET_@}; do unset "$theirs"; done
for name in SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PMI_SIZE; do
  [[ "${NNODES:-}" || "${!name:-1}" == 1 ]] || die "$name: is ${!name}, so many times was this script started, and each" \
    "would train alone; start it once a node with NNODES, NODE_RANK and MASTER_ADDR (launch/slurm.sbatch does)," \
    "or each rank by itself: srun or mpirun python -m megamix train $1"
done
nnodes="${NNODES:-1}"
[[ "$nnodes" =~ ^[1-9][0-9]*$ ]] || die "NNODES: got $nnodes, must be 1 or more; write NNODES=2"
for name in RDZV_ENDPOINT RDZV_ID; do
  [[ -z "${!name:-}" ]] || die "$name: got ${!name}, is not read: machines meet at MASTER_ADDR and MASTER_PORT, each" \
    "with its NODE_RANK; unset it, write MASTER_ADDR=node0 MASTER_PORT=29500 NODE_RANK=0, 1, ... (docs/security.md says why)"
done
node_rank="${NODE_RANK:-0}" master_port="${MASTER_PORT:-29500}"
[[ "$node_rank" =~ ^(0|[1-9][0-9]*)$ ]] && ((node_rank < nnodes)) ||
  die "NODE_RANK: got $node_rank, must be 0 to $((nnodes - 1)) with NNODES=$nnodes; number the machines from 0"
if [[ "$nnodes" != 1 ]]; then
  [[ -n "${NODE_RANK:-}" ]] || die "NODE_RANK: missing with NNODES=$nnodes; number the machines from 0: NODE_RANK=0, 1, ..."
  [[ -n "${MASTER_ADDR:-}" ]] ||
    die "MASTER_ADDR: missing with NNODES=$nnodes; set it to the name or address of machine 0, the same on all"
  [[ "$master_port" =~ ^[1-9][0-9]{0,4}$ ]] && ((master_port < 65536)) ||
    die "MASTER_PORT: got $master_port, must be 1 to 65535; write MASTER_PORT=29500"
fi
# torch runs what lies in its cache of compiled code, by default at a place in /tmp where anybody may have made it first.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_${USER:-$UID}}"
{ mkdir -p -- "$TORCHINDUCTOR_CACHE_DIR" && [[ -O "$TORCHINDUCTOR_CACHE_DIR" ]]; } ||
  die "TORCHINDUCTOR_CACHE_DIR: got $TORCHINDUCTOR_CACHE_DIR, must be a folder of yours: whose it is can run code in the" \
    "job; name another"
[[ "${NPROC_PER_NODE:-1}" =~ ^[1-9][0-9]*$ ]] ||
  die "NPROC_PER_NODE: got $NPROC_PER_NODE, must be 1 or more; write NPROC_PER_NODE=2"
find_installed_python torch numpy pydantic safetensors psutil
# One process checks the job, and forks its ranks once it has loaded all that they need. It ends with their status. The
# ranks of one machine meet on loopback.
exec "$PYTHON" -m megamix.cli.pretrain "$@" $check ${memory[@]+"${memory[@]}"}
