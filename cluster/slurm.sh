#!/usr/bin/env bash
# isoGPT under Slurm:
#
#     sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 cluster/slurm.sh config/train_gpt2.py --out_dir=out-gpt2 \
#         --wandb_log=False
#
# Starts torchrun on each node. The job saves a checkpoint and stops before its time limit, when it is preempted, on a
# signal (scancel --signal=USR1, sbatch --signal=USR1@300) and on scancel. It is requeued, except after scancel, and its
# next start resumes. Submit it from a folder on a file system that all nodes share. Environment variables: PYTHON
# (interpreter, for instance of a virtual environment), NPROC (processes per node; default: its GPUs), HEAD (a name or
# address of the first node that all nodes can reach), SAVING (seconds reserved for saving before the time limit, and
# torchrun's limit after a signal, which does not delay Slurm's own KILL; default: 120), TRAIN (the script; default:
# train.py). Ports and Slurm's settings: docs/launchers.md, "Running on a cluster".
#SBATCH --job-name=isogpt
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -u

for argument in "$@"; do
    case $argument in
        --out_dir="~"/*) out=$HOME/${argument#--out_dir="~"/} ;; # as train.py reads it
        --out_dir=*) out=${argument#--out_dir=} ;;
        --init_from=auto*) start=$argument ;; # auto:gpt2-xl: the first start uses these weights
        --init_from=resume) ;;
        --init_from=*)
            echo "error: slurm.sh: $argument: a job that was requeued has to resume, so type --init_from=auto:${argument#*=} to start from weights, or leave --init_from out" >&2
            exit 2
            ;;
    esac
done
if [ -z "${out:-}" ]; then
    echo "error: slurm.sh: set the run's folder with --out_dir=FOLDER, which tells the job whether the run is complete" >&2
    exit 2
fi

train=${TRAIN:-$SLURM_SUBMIT_DIR/train.py}
processes=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
head=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
saving=${SAVING:-120}
limit=0
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e 2> /dev/null)
case $end in # a date if the job has a time limit
    [0-9]*T*)
        left=$(($(date -d "$end" +%s) - $(date +%s)))
        limit=$((left - saving))
        if [ $limit -le 0 ]; then
            echo "error: slurm.sh: the job ends in $left s, of which SAVING=$saving s are reserved for saving: submit it with a longer --time, or with a smaller SAVING" >&2
            exit 2
        fi
        ;;
esac

# whether the last start was stopped on request before it had taken and saved more than one step
gained_nothing() {
    grep -qs '"steps": [01]}' "$out/PREEMPTED"
}
before=
gained_nothing && before=nothing
rm -f "$out/PREEMPTED" # an old one would requeue a job that fails at the start, forever

unset OMP_PROC_BIND # with it, torch binds torchrun, and so all ranks of a node, to one core
# without it, torchrun's agents keep the addresses of an earlier rendezvous
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$saving # seconds from a signal until torchrun kills the workers
signals="TERM INT HUP QUIT USR1 USR2 ALRM XCPU PWR"
cancelled=
pass_on() { # to the tasks: with scancel --batch and sbatch --signal=B:USR1@300, only this script receives a signal
    [ "$1" = TERM ] && cancelled=yes # scancel, or Slurm has requeued the job itself
    scancel --signal="$(kill -l "$1")" "$SLURM_JOB_ID" 2> /dev/null # as a number: it does not know PWR
}
for name in $signals; do
    trap "pass_on $name" "$name"
done
srun --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$processes" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$head:$((10000 + SLURM_JOB_ID % 20000))" --rdzv-id="$SLURM_JOB_ID" \
    --signals-to-handle="SIG${signals// /,SIG}" \
    "$train" "$@" --time_limit_s=$limit "${start:---init_from=auto}" &
step=$!
wait $step
status=$?
while kill -0 $step 2>/dev/null; do # a signal ended the wait, not the step
    wait $step
    status=$?
done

if [ -z "$cancelled" ] && [ -e "$out/PREEMPTED" ]; then
    if [ "$before" ] && gained_nothing; then
        echo "error: slurm.sh: twice in succession, the run had to stop before it saved more than one step, so the job is not requeued: submit it with a longer --time, and without --save_checkpoint=False" >&2
        exit 1
    fi
    echo "slurm.sh: stopped on request, requeueing the job"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
