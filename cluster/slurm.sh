#!/usr/bin/env bash
# isoGPT under Slurm:
#
#     sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 cluster/slurm.sh config/train_gpt2.py --out_dir=out-gpt2
#
# One torchrun on each node. The job saves and stops before its time limit, when it is preempted and on scancel; after
# the first two it goes back into the queue, and its next start goes on from there. Submit it in a folder that all nodes
# see. What may be set in the environment: PYTHON (of a virtual environment), NPROC (processes a node; default: its
# GPUs), HEAD (a name of the first node that all reach), SAVING (seconds kept for saving before the time limit), TRAIN
# (another train.py).
#SBATCH --job-name=isogpt
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -u

for argument in "$@"; do
    case $argument in
        --out_dir=*) out=${argument#--out_dir=} ;;
        --init_from=auto*) start=$argument ;; # auto:gpt2-xl, where the first start is from those weights
    esac
done
if [ -z "${out:-}" ]; then
    echo "slurm.sh: name the run's folder with --out_dir=, so that the job can tell whether it is done" >&2
    exit 2
fi

train=${TRAIN:-$SLURM_SUBMIT_DIR/train.py}
processes=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
head=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
limit=0
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e 2> /dev/null)
case $end in # a date, where the job has a limit
    [0-9]*T*)
        left=$(($(date -d "$end" +%s) - $(date +%s) - ${SAVING:-120}))
        limit=$((left > 1 ? left : 1))
        ;;
esac
rm -f "$out/PREEMPTED" # an older one would start a job that fails over and over

# torchrun's agents remember the addresses of an earlier round otherwise
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cancelled=
trap 'cancelled=yes' TERM # the whole job ends: scancel, or Slurm has put it back into the queue itself
srun --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$processes" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$head:$((10000 + SLURM_JOB_ID % 20000))" --rdzv-id="$SLURM_JOB_ID" \
    "$train" "$@" --stop_after_s=$limit "${start:---init_from=auto}" &
step=$!
wait $step
status=$?
while kill -0 $step 2>/dev/null; do # a signal ended the wait, not the step
    wait $step
    status=$?
done

if [ -z "$cancelled" ] && [ -e "$out/PREEMPTED" ]; then
    echo "slurm.sh: stopped as asked, back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
