#!/usr/bin/env bash
# One process on each of 4 hosts; each has all accelerators of its host. Submit by: sbatch docs/guides/jobs/slurm.sh
# train.py has checkpoints="run" and fit(resume=True).
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120     # for a last checkpoint: more than Checkpoints(preemption_deadline=), which is 110 s
#SBATCH --requeue             # after the failure of a host, by SLURM itself
#SBATCH --open-mode=append    # keep the output of the run before
set -euo pipefail

# JAX gives a task of SLURM the one accelerator of its local number; with one task on a host, it is to have all.
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
# Where the first host's name means loopback there:
# export JAX_COORDINATOR_ADDRESS="$(hostname -I | cut -d' ' -f1):8476"
# Compilations are kept in ~/.cache/jaxpp_flax/compiled/HOST; where the home is no place for that:
# export XDG_CACHE_HOME=/scratch/$USER

# After a failure this package ends all processes within 30 seconds, each with its reason (status 69: because of another
# one), and SLURM those that were still starting. Told to end others at once, by --kill-on-bad-exit=1, SLURM would kill
# the coordination service too, and the reasons with it. Then all start again on the same hosts.
status=0
docs/guides/jobs/restarts.sh run \
    srun --kill-on-bad-exit=0 --wait=60 python -m jaxpp_flax.launch --cluster train.py --steps 100000 || status=$?

# 75: it was asked to end, and has saved. 143: that save took too long, and the checkpoint before it is a new one.
# Without a new one the job would begin again, time after time: then raise @120 above, and preemption_deadline with it.
case "$status" in 75 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$status"
