"""Several hosts, made of Linux network namespaces: one process on each, and a network between them that can be cut.

`pytest -m soak tests/launch/test_hosts.py`, as root, with iproute2 installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.running import Run, addresses, started
from tests.running import wait_for

pytestmark = pytest.mark.soak

COUNT, STEPS, PORT, FAILURE_TIMEOUT = 3, 8, 8476, 30.0
FOREVER = 100_000

PROGRAM = """
import os, sys
from pathlib import Path
import jax
address, place, count, directory, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
jax.config.update("jax_num_cpu_devices", 6 // count)
if os.environ.get("JAXPP_FLAX_TRANSPORT") == "device_put":
    jax.config.update("jax_cross_host_transfer_socket_address", f"10.77.0.{place + 1}:41300")
    jax.config.update("jax_cross_host_transport_addresses", f"10.77.0.{place + 1}:0")
if count > 1:
    from jaxpp_flax.launch import initialize
    initialize(coordinator_address=address, num_processes=count, process_id=place)
from jaxpp_flax.trainers import Callback, Checkpoints
from tests.checkpoint.program import batches, make_trainer

class Losses(Callback):
    def on_metrics(self, trainer, step, metrics):
        print(f"step {step} loss {float(metrics['loss']).hex()}", flush=True)

trainer = make_trainer(Checkpoints(directory, every=5, keep=3), stages=6, depth=6)
trainer.fit(batches(), steps=steps, callbacks=[Losses()])
"""


def ip(*words: str, check: bool = True) -> str:
    """Call the tool of that name."""
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Hosts:
    """Namespaces with an address of both versions each, on one bridge."""

    names: tuple[str, ...]
    cables: tuple[str, ...]

    def start(self, stack: ExitStack, folder: Path, *, address: str, **environment: str) -> list[Run]:
        """The program on each of them."""
        (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
        runs: list[Run] = []
        for place, name in enumerate(self.names):
            command = ["ip", "netns", "exec", name, sys.executable, "train.py", address, str(place), str(COUNT)]
            command += [str(folder / "checkpoints"), str(FOREVER)]
            runs.append(stack.enter_context(started(folder, command, **environment)))
        return runs


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Made for each test; skipped where the system does not let us."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("namespaces are made by root, with iproute2")
    tag = uuid.uuid4().hex[:6]
    bridge, names = f"jf{tag}", tuple(f"jf{tag}h{i}" for i in range(COUNT))
    cables = tuple(f"jf{tag}v{i}" for i in range(COUNT))
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made here: {error.stderr}")
        ip("link", "set", bridge, "up")
        for place, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", "eth0")
            ip("-n", name, "addr", "add", f"fd77::{place + 1}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
        yield Hosts(names, cables)
    finally:
        for name, cable in zip(names, cables, strict=True):
            ip("link", "del", cable, check=False)
            ip("netns", "del", name, check=False)
        ip("link", "del", bridge, check=False)


def losses(run: Run) -> dict[int, str]:
    """Each step's, to the last bit."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", run.stdout)}


def wait_for_steps(runs: list[Run], count: int) -> None:
    """Until all of them have told so many losses."""
    wait_for(lambda: all(run.popen.poll() is not None or len(losses(run)) >= count for run in runs), "the steps")
    for run in runs:
        assert run.popen.poll() is None, run.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of one process with all the devices."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    with started(folder, [sys.executable, "train.py", "", "0", "1", str(folder / "checkpoints"), str(STEPS)]) as run:
        assert run.finish() == 0, run.stderr
        found = losses(run)
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize(
    ("transport", "address"),
    [("transfer", f"10.77.0.1:{PORT}"), ("device_put", f"10.77.0.1:{PORT}"), ("transfer", f"[fd77::1]:{PORT}")],
)
def test_losses_are_those_of_one_process(
    hosts: Hosts, alone: dict[int, str], tmp_path: Path, transport: str, address: str
):
    with ExitStack() as stack:
        runs = hosts.start(stack, tmp_path, address=address, JAXPP_FLAX_TRANSPORT=transport)
        wait_for_steps(runs, STEPS)
        processes = [int(process) for host in hosts.names for process in ip("netns", "pids", host).split()]
        sockets = addresses(processes)
    assert len(sockets) >= COUNT
    assert not [found for found in sockets if set(found) == {"0"}], "somebody listens on a wildcard"
    for run in runs:
        said = losses(run)
        assert {step: said[step] for step in alone} == alone


def cut(hosts: Hosts, victim: int) -> None:
    """The network to a host is gone, and nobody is told."""
    ip("link", "set", hosts.cables[victim], "down")


def kill(hosts: Hosts, victim: int) -> None:
    """Its process is killed."""
    for process in ip("netns", "pids", hosts.names[victim]).split():
        # Process 0 has the coordination service beside it, which outlives it for as long as the others need.
        if b"train.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(int(process), 9)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("trouble", [kill, cut])
def test_the_others_end_in_time_and_say_why(
    hosts: Hosts, tmp_path: Path, trouble: Callable[[Hosts, int], None], victim: int
):
    with ExitStack() as stack:
        runs = hosts.start(stack, tmp_path, address=f"10.77.0.1:{PORT}")
        wait_for_steps(runs, 2)
        trouble(hosts, victim)
        begin = time.monotonic()
        survivors = [run for place, run in enumerate(runs) if place != victim]
        wait_for(lambda: all(run.popen.poll() is not None for run in survivors), "the others' end", 2 * FAILURE_TIMEOUT)
        # Not a measurement but the promise.
        assert time.monotonic() - begin < FAILURE_TIMEOUT
        # With the network to the coordination service gone, it is what is missed first.
        named = rf"process {victim}|the coordination service at 10.77.0.1:{PORT} \(the host of process 0\)"
        for run in survivors:
            assert run.popen.returncode == 69, run.stderr
            assert re.search(rf"the run has ended: ({named})", run.stderr), run.stderr
            assert re.search(r"Process \d was (waiting for|at) ", run.stderr), run.stderr
