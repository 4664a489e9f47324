"""The job files of docs/guides/jobs: what they are for, when they start a run again, and a run that lives by them."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.trainers import KILLED_STATUS, PREEMPTED_STATUS, Checkpoints
from tests.launch.running import QUICK, started
from tests.running import ROOT

pytestmark = pytest.mark.processes

JOBS = ROOT / "docs" / "guides" / "jobs"


def test_job_scripts_are_bash():
    for script in (JOBS / "slurm.sh", JOBS / "restarts.sh", ROOT / "examples" / "finetune" / "job.slurm"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(JOBS / "restarts.sh", os.X_OK)  # job files call it by its name


def test_kubernetes_starts_all_pods_again():
    yaml = pytest.importorskip("yaml")
    parts = {part["kind"]: part for part in yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())}
    assert list(parts) == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    jobs: Any = parts["JobSet"]["spec"]
    [processes] = jobs["replicatedJobs"]
    job = processes["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    # JAX takes the number of processes from `parallelism`, and the index from that of the pod.
    assert (job["completions"], job["completionMode"], processes["replicas"]) == (job["parallelism"], "Indexed", 1)
    # Kubernetes takes a policy of failures from pods that it does not start again by itself alone.
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["serviceAccountName"] == parts["ServiceAccount"]["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] > Checkpoints("run").preemption_deadline  # type: ignore[operator]
    [rule] = jobs["failurePolicy"]["rules"]
    assert rule == {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    [lost, saved] = job["podFailurePolicy"]["rules"]
    assert lost == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    exits = {"containerName": container["name"], "operator": "In", "values": [PREEMPTED_STATUS]}
    assert saved == {"action": "FailJob", "onExitCodes": exits}
    [mount] = container["volumeMounts"]
    assert container["env"] == [{"name": "XDG_CACHE_HOME", "value": f"{mount['mountPath']}/cache"}]


def job_folder(folder: Path, **commands: str) -> dict[str, str]:
    """A folder to submit jobs from, with stand-ins for commands of the cluster; returns the jobs' environment."""
    shutil.copytree(JOBS, folder / "docs" / "guides" / "jobs")
    (folder / "commands").mkdir()
    for name, does in commands.items():
        (folder / "commands" / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / "commands" / name).chmod(0o755)
    path = f"{folder / 'commands'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": str(random.randrange(10**6))}  # JAX derives the port from it


@pytest.mark.parametrize(
    ("lives", "status", "queued"),
    [
        ("0", 0, False), ("2", 2, False), ("130", 130, False),
        (f"{PREEMPTED_STATUS}", PREEMPTED_STATUS, True),
        (f"69+ {PREEMPTED_STATUS}", PREEMPTED_STATUS, True),
        # The job was asked to end, and its save took too long: it goes on from a new checkpoint alone.
        (f"{KILLED_STATUS}+", KILLED_STATUS, True), (f"69+ {KILLED_STATUS}* 1 1", 1, False),
        # A failed run starts again, until three in a row have saved nothing: not a whole checkpoint, that is.
        ("1+ 137+ 69+ 134+ 0", 0, False), ("69 1 69", 1, False), ("69 1 69+ 137 69* 1", 1, False),
    ],
)  # fmt: skip
def test_a_job_starts_again_as_long_as_it_comes_further(tmp_path: Path, lives: str, status: int, queued: bool):
    """Each life: its exit status; `+`, a checkpoint was saved; `*`, a part of one."""
    (tmp_path / "run" / "4").mkdir(parents=True)
    assert submitted(tmp_path, lives, "run", "docs/guides/jobs/slurm.sh") == (status, queued)


def test_the_job_of_the_recipe_does_so_too(tmp_path: Path):
    recipe = str(ROOT / "examples" / "finetune" / "job.slurm")
    job = [recipe, "--model", "tiny", "--output", "there", "--stages", "2"]
    assert submitted(tmp_path, f"1+ 69+ {PREEMPTED_STATUS}", "there/checkpoints", *job) == (PREEMPTED_STATUS, True)


def submitted(folder: Path, lives: str, checkpoints: str, *job: str) -> tuple[int, bool]:
    """The status of a job that has lived so, and whether it is queued again."""
    srun = """
    life=$(($(cat lives) + 1)); echo $life >lives
    read -ra all <<<"$LIVES"
    case "${all[life - 1]}" in
        *+) mkdir -p "$CHECKPOINTS/${life}0" ;;
        *\\*) mkdir -p "$CHECKPOINTS/${life}0.orbax-checkpoint-tmp" ;;
    esac
    exit ${all[life - 1]%[+*]}
    """
    own = {**job_folder(folder, srun=srun, scontrol='echo "$@"'), "LIVES": lives, "CHECKPOINTS": checkpoints}
    (folder / "lives").write_text("0")
    run = subprocess.run(
        ["bash", *job], cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert run.stdout in ("", f"requeue {own['SLURM_JOB_ID']}\n"), run.stderr
    assert int((folder / "lives").read_text()) == len(lives.split())
    return run.returncode, bool(run.stdout)


# As SLURM's: two tasks on this host, the highest status of them.
SRUN = """
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_NUM_NODES=1 SLURM_STEP_NODELIST=localhost
for index in 0 1; do SLURM_PROCID=$index SLURM_LOCALID=$index "$@" & done
highest=0
for _ in 0 1; do
    status=0
    wait -n || status=$?
    if ((status > highest)); then highest=$status; fi
done
exit $highest
"""

TRAIN = """
import os, signal, sys
import jax
from pathlib import Path
from jaxpp_flax.trainers import Callback, Checkpoints
from tests.checkpoint.program import batches, make_trainer

class Losses(Callback):
    def on_metrics(self, trainer, step, metrics):
        print(f"process {jax.process_index()} step {step} loss {float(metrics['loss']).hex()}", flush=True)
        if "SLURM_JOB_ID" in os.environ and not Path(f"happened {step}").exists():
            if (step, jax.process_index()) == (3, 1):
                Path("happened 3").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if (step, jax.process_index()) == (6, 0):
                Path("happened 6").touch()
                # SLURM tells all processes of the job, the coordination service too.
                for process in (*Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(), os.getpid()):
                    os.kill(int(process), signal.SIGTERM)

trainer = make_trainer(Checkpoints("run", every=2, keep=3), stages=2, depth=2)
trainer.fit(batches(), steps=8, resume=True, callbacks=[Losses()])
"""


@pytest.mark.slow
def test_a_job_that_is_killed_and_queued_again_ends_as_an_undisturbed_run(tmp_path: Path):
    """A task is killed, and all start again in the job; one is told to end, and all go on in the job queued anew."""
    said = {}
    own = job_folder(tmp_path, srun=SRUN, scontrol='echo "$@"')
    (tmp_path / "train.py").write_text(TRAIN)
    jobs = {"undisturbed": [*QUICK, "-n", "2", "train.py"], "SLURM": ["bash", "docs/guides/jobs/slurm.sh"]}
    for how, job in jobs.items():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        printed, statuses = "", list[int]()
        while len(statuses) == printed.count("requeue"):
            with started(tmp_path, job, **(own if how == "SLURM" else {})) as run:
                statuses.append(run.finish())
                printed += run.stdout
                run.check_nothing_is_left()
        said[how] = set(re.findall(r"(process \d step \d+ loss \S+)$", printed, re.MULTILINE))
        assert statuses == ([PREEMPTED_STATUS, 0] if how == "SLURM" else [0]), run.stderr
    assert said["SLURM"] == said["undisturbed"]  # to the last bit
    assert len(said["SLURM"]) == 2 * 8
