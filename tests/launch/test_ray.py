"""`jaxpp_flax.launch.ray` on a Ray cluster of this machine alone; skipped where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpp_flax.launch import LaunchError
from jaxpp_flax.launch import ray as ray_launch
from jaxpp_flax.launch.ray import run as run_on_ray
from tests.launch.running import started

pytestmark = pytest.mark.processes

BEGIN = """
import os, signal, time
import ray
from jaxpp_flax.launch import LaunchError
from jaxpp_flax.launch.ray import run
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=True, _node_ip_address="127.0.0.1")
"""


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'jaxpp-flax\[ray\]'"):
        run_on_ray(print, num_processes=2)


def test_no_process_is_refused():
    with pytest.raises(LaunchError, match="num_processes=0"):
        run_on_ray(print, num_processes=0)


class RayTaskError(Exception):
    """What Ray raises at the driver for an exception of an actor's."""


RAY = SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=RayTaskError))
DIED, RAISED = Exception("the actor died"), RayTaskError("KeyError: bad luck")
CONSEQUENCE = RayTaskError("ProcessFailedError: process 1 ...")


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ({0: CONSEQUENCE, 1: RAISED}, "process 1 raised, and the run has ended: KeyError: bad luck"),
        ({0: CONSEQUENCE, 1: DIED}, "process 1 was killed, or lost its host, and the run has ended: the actor died"),
        ({0: CONSEQUENCE, 1: DIED, 2: RAISED}, "process 2 raised"),
        ({0: CONSEQUENCE}, "process 1 has failed, as process 0 found, and the run has ended: no sign of life"),
    ],
)
def test_a_process_that_ends_because_of_another_is_not_blamed(errors: dict[int, Exception], message: str):
    told = {0: ray_launch._Told(0, failed=1, why="no sign of life")}
    failure = ray_launch._first_failure(RAY, ray_launch._News(None, errors, told))
    assert str(failure).startswith(message)
    assert failure.__cause__ is (None if len(errors) == 1 else errors[2 if 2 in errors else 1])


@pytest.mark.parametrize("preempted", [True, False])
def test_processes_that_were_asked_to_end_are_no_failure(preempted: bool, capsys: pytest.CaptureFixture[str]):
    def train(report: ray_launch.Report) -> int:
        if preempted:
            raise SystemExit(75)
        return 7

    results = [ray_launch._call(train, print, ())] * 2
    ray = SimpleNamespace(wait=lambda calls, **_: (calls, []), get=lambda call: call)
    queue = SimpleNamespace(get_nowait_batch=lambda count: [], qsize=lambda: 0)
    if preempted:
        with pytest.raises(SystemExit, match="75"):
            ray_launch._follow(ray, results, queue, ray_launch._News(None), 1.0)
        assert "preempted: all 2 processes have saved after SIGTERM" in capsys.readouterr().err
    else:
        assert ray_launch._follow(ray, results, queue, ray_launch._News(None), 1.0) == [7, 7]


def check(folder: Path, program: str, *printed: str) -> None:
    pytest.importorskip("ray")
    (folder / "driver.py").write_text(BEGIN + program, encoding="utf-8")
    with started(folder, [sys.executable, "driver.py"]) as run:
        assert run.finish() == 0, run.stdout + run.stderr
        for text in printed:
            assert text in run.stdout, run.stdout + run.stderr


@pytest.mark.extras
def test_losses_and_a_checkpoint_come_back_to_the_driver(tmp_path: Path):
    program = """
def train(report, directory, steps):
    import jax, jax.numpy as jnp
    from jax.experimental import multihost_utils
    weight = jnp.ones(3)
    for step in range(steps):
        weight = weight - 0.5 * multihost_utils.process_allgather(weight).mean(axis=0)
        report({"step": step, "loss": jnp.sum(weight)})
    if jax.process_index() == 0:
        import numpy as np
        np.save(directory + "/weight.npy", weight)
    return jax.process_index(), len(jax.devices()), weight

heard = []
results = run(train, os.getcwd(), 3, num_processes=2, devices_per_process=2, one_per_host=False, on_report=heard.append)
print("heard", [(entry["step"], float(entry["loss"])) for entry in heard])
print("results", [(index, devices, type(weight).__module__, weight.tolist()) for index, devices, weight in results])
import numpy as np
print("checkpoint", np.load("weight.npy").tolist())
"""
    weight = [0.125] * 3
    check(
        tmp_path,
        program,
        "heard [(0, 1.5), (1, 0.75), (2, 0.375)]",
        f"results [(0, 4, 'numpy', {weight}), (1, 4, 'numpy', {weight})]",
        f"checkpoint {weight}",
    )


@pytest.mark.extras
def test_an_exception_in_one_process_reaches_the_driver(tmp_path: Path):
    program = """
def train(report):
    from jaxpp_flax.processes import process_group
    if process_group().process_index == 1:
        raise KeyError("bad luck")
    process_group().barrier("the moon")  # raises as soon as process 1 has failed, before the driver may know of that

try:
    run(train, num_processes=2, one_per_host=False, failure_timeout_s=10.0)
except LaunchError as error:
    print("caught", str(error).splitlines()[0], "bad luck" in str(error), type(error.__cause__).__name__)
"""
    check(tmp_path, program, "caught process 1 raised", "True RayTaskError(KeyError)")


@pytest.mark.extras
def test_a_killed_actor_ends_the_run(tmp_path: Path):
    program = """
def train(report):
    from jaxpp_flax.processes import process_group
    if process_group().process_index == 1:
        os.kill(os.getpid(), number)
    process_group().barrier("the moon")

for number in signal.SIGKILL, signal.SIGSTOP:
    try:
        run(train, num_processes=2, one_per_host=False, failure_timeout_s=10.0)
    except LaunchError as error:
        print("caught", str(error).splitlines())
"""
    check(tmp_path, program, "caught ['process 1 was killed", "caught ['process 1 has failed, as process 0 found, and")


@pytest.mark.extras
def test_hosts_that_there_are_not(tmp_path: Path):
    program = """
try:
    run(print, num_processes=2, initialization_timeout_s=3.0)
except LaunchError as error:
    print("caught", error)
"""
    check(tmp_path, program, "caught Ray did not find 2 hosts with {'CPU': 1.0} within 3 s")
