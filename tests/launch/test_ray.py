"""`jaxpp_flax.launch.ray` on a Ray cluster of this machine alone; skipped where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpp_flax.launch import LaunchError
from jaxpp_flax.launch.ray import function as ray_launch
from jaxpp_flax.launch.ray import run as run_on_ray
from jaxpp_flax.processes.store import ProcessFailedError
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


class RayTaskError(Exception):
    """What Ray raises at the driver for an exception of an actor's."""


class FailureRayTaskError(RayTaskError, ProcessFailedError):
    """The same for this exception: Ray makes such classes."""


DIED, RAISED = Exception("the actor died"), RayTaskError("KeyError: bad luck")
CONSEQUENCE = FailureRayTaskError("process 1: no sign of life")


def results_of(*calls: object) -> list[object]:
    """What the driver makes of calls that have ended in this order."""

    def get(call: object) -> object:
        if isinstance(call, Exception):
            raise call
        return call

    ray = SimpleNamespace(
        wait=lambda calls, **_: (calls[:1], calls[1:]),
        get=lambda calls: [*map(get, calls)] if isinstance(calls, list) else get(calls),
        exceptions=SimpleNamespace(RayTaskError=RayTaskError),
    )
    return ray_launch._results(ray, [*calls], 1.0)


@pytest.mark.parametrize(
    ("ends", "cause", "message"),
    [
        ([CONSEQUENCE, RAISED], RAISED, "process 1 raised, and the run has ended: KeyError: bad luck"),
        ([DIED, CONSEQUENCE, RAISED], RAISED, "process 2 raised"),
        ([CONSEQUENCE, DIED], CONSEQUENCE, "process 0 raised, and the run has ended: process 1: no sign of life"),
        ([7, DIED], DIED, "process 1 was killed, lost its host, or ended as its output says, and the run has ended:"),
    ],
)
def test_a_process_that_ends_because_of_another_is_not_blamed(ends: list[object], cause: Exception, message: str):
    with pytest.raises(LaunchError, match=message) as raised:
        results_of(*ends)
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("preempted", [True, False])
def test_processes_that_were_asked_to_end_are_no_failure(preempted: bool, capsys: pytest.CaptureFixture[str]):
    def train() -> int:
        if preempted:
            raise SystemExit(75)
        return 7

    results = [ray_launch._call(train, ()) for _ in range(2)]
    if preempted:
        with pytest.raises(SystemExit, match="75"):
            results_of(*results)
        assert "preempted: all 2 processes have saved after SIGTERM" in capsys.readouterr().err
    else:
        assert results_of(*results) == [7, 7]


def check(folder: Path, program: str, *printed: str) -> None:
    pytest.importorskip("ray")
    (folder / "driver.py").write_text(BEGIN + program, encoding="utf-8")
    with started(folder, [sys.executable, "driver.py"]) as run:
        assert run.finish() == 0, run.stdout + run.stderr
        for text in printed:
            assert text in run.stdout, run.stdout + run.stderr


@pytest.mark.extras
def test_results_and_a_checkpoint_come_back_to_the_driver(tmp_path: Path):
    program = """
def train(directory, steps):
    import jax, jax.numpy as jnp
    from jax.experimental import multihost_utils
    weight = jnp.ones(3)
    for step in range(steps):
        weight = weight - 0.5 * multihost_utils.process_allgather(weight).mean(axis=0)
    if jax.process_index() == 0:
        import numpy as np
        np.save(directory + "/weight.npy", weight)
    return jax.process_index(), len(jax.devices()), weight

devices = {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "8"}
results = run(train, os.getcwd(), 3, num_processes=2, strategy="PACK", environment=devices)
print("results", [(index, devices, type(weight).__module__, weight.tolist()) for index, devices, weight in results])
import numpy as np
print("checkpoint", np.load("weight.npy").tolist())
"""
    weight = [0.125] * 3
    check(
        tmp_path,
        program,
        f"results [(0, 4, 'numpy', {weight}), (1, 4, 'numpy', {weight})]",
        f"checkpoint {weight}",
    )


@pytest.mark.extras
def test_the_driver_is_told_what_went_wrong(tmp_path: Path):
    """Hosts that there are not, an exception of one process, a process that is killed and one that stands still."""
    program = """
from jaxpp_flax.processes import process_group

def raises():
    if process_group().process_index == 1:
        raise KeyError("bad luck")
    process_group().barrier("the moon")  # raises as soon as process 1 has failed, before the driver may know of that

def struck():
    if process_group().process_index == 1:
        os.kill(os.getpid(), number)
    process_group().barrier("the moon")

def caught(function, **options):
    try:
        run(function, num_processes=2, **options)
    except LaunchError as error:
        print("caught", error, "cause:", type(error.__cause__).__name__)

caught(print, initialization_timeout_s=3.0)
caught(raises, strategy="PACK", failure_timeout_s=10.0)
for number in signal.SIGKILL, signal.SIGSTOP:
    caught(struck, strategy="PACK", failure_timeout_s=10.0)
"""
    check(
        tmp_path,
        program,
        "caught Ray did not find 2 places (STRICT_SPREAD) with {'CPU': 1.0} within 3 s",
        "caught process 1 raised",
        "bad luck",
        "cause: RayTaskError(KeyError)",
        "caught process 1 was killed",
        "no sign of life",
    )
