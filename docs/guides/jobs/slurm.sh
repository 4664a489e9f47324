#!/usr/bin/env bash
# One process on each of 4 hosts; each has all accelerators of its host. Submit by: sbatch docs/guides/jobs/slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120     # for a last checkpoint: more than Checkpoints(preemption_deadline=), which is 110 s
#SBATCH --requeue             # after the failure of a host
#SBATCH --open-mode=append    # keep the output of the run before
set -euo pipefail

# JAX gives a task of SLURM the one accelerator of its local number; with one task on a host, it is to have all.
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7

# A task that fails ends the others at once; this package would do so within 30 seconds.
status=0
srun --kill-on-bad-exit=1 python -m jaxpp_flax.launch --cluster train.py --steps 100000 || status=$?

# 75: it was asked to end, and has saved. 143: the save took too long; the checkpoint before is whole, if there is one.
# SLURM runs the job again from there, if train.py has fit(resume=True) and checkpoints="run". Without a whole
# checkpoint the job would begin again, time after time: then raise @120 above, and preemption_deadline with it.
steps=$(ls run 2>/dev/null | grep -cx '[0-9]*') || true    # unfinished ones have other names; a bucket needs its own ls
if [ "$status" = 75 ] || { [ "$status" = 143 ] && [ "$steps" -gt 0 ]; }; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
