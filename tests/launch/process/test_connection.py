"""`initialize`: without a launcher, on what looks like a cluster, and what it refuses."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest

from jaxpp_flax import _compat
from jaxpp_flax.launch import LaunchError, coordinator, initialize
from jaxpp_flax.launch.cli import main
from jaxpp_flax.launch.coordinator import connections, is_taken
from jaxpp_flax.launch.process import place
from jaxpp_flax.launch.process.place import listening_addresses
from jaxpp_flax.launch.settings import LaunchSettings
from tests.launch.running import Run, started
from tests.processes.faults import says
from tests.running import PATIENCE, free_port, wait_for

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, time
from jaxpp_flax.launch import initialize
if len(sys.argv) > 1:
    group = initialize(coordinator_address=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]),
                       failure_timeout_s=8.0)
else:
    group = initialize()
import jax
print("connected", group.process_index, group.process_count, jax.process_count(), flush=True)
"""
WAIT = """
with group.waiting("the loss of step 4", on=1 - group.process_index):
    time.sleep(1000)
"""


def start_two(stack: ExitStack, folder: Path, source: str) -> list[Run]:
    (folder / "script.py").write_text(source, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    commands = [["script.py", address, str(index)] for index in range(2)]
    return [stack.enter_context(started(folder, command)) for command in commands]


def test_places_given_by_hand(tmp_path: Path):
    with ExitStack() as stack:
        runs = start_two(stack, tmp_path, SCRIPT)
        for index, run in enumerate(runs):
            assert run.finish() == 0, run.stderr
            assert f"connected {index} 2 2" in run.stdout
        for run in runs:
            run.check_nothing_is_left(seconds=30.0)  # the service stays 5 s for those that leave last


def test_a_second_process_of_a_host_with_an_index_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(place, "_WAIT_FOR_PORT_SECONDS", 0.3)
    first = initialize_as(1)
    says = r"another process of this host is process 1 of the run at 127\.0\.0\.1:5\. Give each .* from 0 to 1"
    with pytest.raises(LaunchError, match=says):
        initialize_as(1)
    initialize_as(0).close()
    first.close()
    initialize_as(1).close()


def test_a_data_loader_s_worker_does_not_hold_the_place_of_its_process():
    first = initialize_as(1)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs nothing of this process that has threads
        worker = os.fork()
    if worker == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        first.close()
        initialize_as(1).close()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(worker, 0)


def initialize_as(process_id: int) -> socket.socket:
    """The first thing that `initialize` does."""
    settings = LaunchSettings(coordinator_address="127.0.0.1:5", num_processes=2, process_id=process_id)
    return place.take_place(settings, None)


def test_the_next_run_may_have_the_same_address_at_once(tmp_path: Path):
    # Process 0 is the first to end: what it served stays for process 1, and is gone when that has ended.
    source = SCRIPT + "if len(sys.argv) > 3 and group.process_index == 0:\n    raise ValueError('no')\n"
    (tmp_path / "script.py").write_text(source + "group.barrier('the end')\n", encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        for more, statuses in [(["fail"], [1, 69]), ([], [0, 0])]:
            commands = [["script.py", address, str(index), *more] for index in range(2)]
            runs = [stack.enter_context(started(tmp_path, command)) for command in commands]
            assert [run.finish() for run in runs] == statuses, runs[0].stderr + runs[1].stderr


def test_the_service_of_the_run_before_lets_nobody_in_while_it_stays_for_its_own(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    port = free_port()
    address = f"127.0.0.1:{port}"
    before = subprocess.Popen(
        [sys.executable, "-m", "jaxpp_flax.launch.coordinator", address, "2", "60"], stdin=subprocess.PIPE
    )
    with ExitStack() as stack:
        stack.callback(before.kill)
        wait_for(lambda: is_taken(port), "the service of the run before")
        before.terminate()  # as SLURM does with all processes of a job at its time limit
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert before.stdin is not None
        before.stdin.close()  # as if its process 0 had died
        wait_for(lambda: not is_taken(port), "the end of the port")
        runs = [stack.enter_context(started(tmp_path, ["script.py", address, str(index)])) for index in (1, 0)]
        assert [run.finish() for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
        assert before.poll() is None
        client.close()
        assert before.wait(timeout=PATIENCE) == 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[Run]]]:
    """Two runs side by side: in the first process 0 is killed, in the second process 1."""
    with ExitStack() as stack:
        started = [start_two(stack, tmp_path_factory.mktemp("killed"), SCRIPT + WAIT) for _ in range(2)]
        for runs in started:
            for run in runs:
                run.wait_for_output("connected")
        time.sleep(2.0)  # the first heartbeats
        for victim, runs in enumerate(started):
            runs[victim].popen.kill()
        yield started


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher_the_door_of_a_killed_process_is_found_closed(killed: list[list[Run]], victim: int):
    survivor = killed[victim][1 - victim]
    assert survivor.finish() == 69
    assert f"process {victim}: it was killed, or ended without a word: its last sign of life came " in survivor.stderr
    assert says("a killed one at a barrier").search(survivor.stderr)
    awaited = f"Process {1 - victim} was waiting for the loss of step 4 (from process {victim})."
    assert awaited in survivor.stderr
    for run in killed[victim]:
        run.check_nothing_is_left(seconds=60.0)


def test_without_a_launcher_an_exception_ends_all(tmp_path: Path):
    with ExitStack() as stack:
        runs = start_two(stack, tmp_path, SCRIPT + "if group.process_index == 0:\n    raise ValueError('no')\n" + WAIT)
        assert [run.finish() for run in runs] == [1, 69]
        assert "ValueError: no" in runs[0].stderr
        # The other one says what it waited for.
        awaited = "Process 1 was waiting for the loss of step 4 (from process 0)."
        assert f"process 0: ValueError: no\n{awaited}" in runs[1].stderr


def test_slurm_is_detected(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    # JAX derives the port from the job's number.
    shared = {"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
              "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NUM_NODES": "1"}  # fmt: skip
    command = [sys.executable, "-m", "jaxpp_flax.launch", "--cluster", "script.py"]
    with ExitStack() as stack:
        runs = [
            stack.enter_context(started(tmp_path, command, **shared, SLURM_PROCID=str(index), SLURM_LOCALID=str(index)))
            for index in range(2)
        ]
        for index, run in enumerate(runs):
            assert run.finish() == 0, run.stderr
            assert f"connected {index} 2 2" in run.stdout


def test_open_mpi_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    place = _compat.detect_cluster(1)
    assert place is not None
    assert (place.process_count, place.process_index, place.local_device_ids) == (8, 5, (1,))
    assert place.coordinator_address.startswith("10.96.0.1:")


def test_a_cluster_that_tells_nonsense_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "eight")
    with pytest.raises(LaunchError, match=r"could not find this process's place .* ValueError: .*'eight'"):
        initialize()


def test_without_a_cluster_it_says_what_to_do():
    with pytest.raises(LaunchError, match=r"found no cluster .* not given num_processes, process_id.*-n 4"):
        initialize(coordinator_address="127.0.0.1:1")


def test_a_place_outside_of_the_run_is_refused():
    with pytest.raises(LaunchError, match="process_id=2: in a run of 2 processes, it must be 0 to 1"):
        initialize(coordinator_address="127.0.0.1:1", num_processes=2, process_id=2)
    with pytest.raises(LaunchError, match="coordinator_address='here': it must be 'host:port'"):
        initialize(coordinator_address="here", num_processes=2, process_id=1)


@pytest.mark.skipif(not hasattr(jax.config, "jax_mtls_cert_file"), reason="mutual TLS is new in JAX 0.12")
def test_mutual_tls_is_refused_by_name():
    jax.config.update("jax_mtls_cert_file", "cert.pem")
    try:
        with pytest.raises(LaunchError, match=r"\['jax_mtls_cert_file'\] ask for mutual TLS.* Unset them"):
            initialize(coordinator_address="localhost:1", num_processes=2, process_id=0)
    finally:
        jax.config.update("jax_mtls_cert_file", None)


def test_an_address_that_cannot_be_resolved_is_refused():
    with pytest.raises(LaunchError, match=r"'no\.such\.host\.invalid:1' cannot be reached or resolved"):
        initialize(coordinator_address="no.such.host.invalid:1", num_processes=2, process_id=1)


@pytest.mark.parametrize(
    ("bind", "own", "service"),
    [
        (None, "127.0.0.1", "127.0.0.1:4321"),
        ("127.0.0.2", "127.0.0.2", "127.0.0.1:4321"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0:4321"),
        ("::", "127.0.0.1", "[::]:4321"),
    ],
)
def test_only_the_service_listens_everywhere_and_only_if_asked(bind: str | None, own: str, service: str):
    place = LaunchSettings(coordinator_address="127.0.0.1:4321", num_processes=2, process_id=0, bind_address=bind)
    assert listening_addresses(place) == (own, service)


def test_an_address_of_another_host_is_refused_to_listen_on():
    with pytest.raises(LaunchError, match=r"bind_address='192\.0\.2\.1': this host cannot listen there"):
        initialize(coordinator_address="127.0.0.1:1", num_processes=2, process_id=1, bind_address="192.0.2.1")


def test_a_port_that_another_run_has_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(place, "_WAIT_FOR_PORT_SECONDS", 0.0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as JAX does: its services would share the port
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        settings = LaunchSettings(coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=0)
        place.take_place(settings, settings.coordinator_address).close()
        other.listen()
        with pytest.raises(LaunchError, match=rf"cannot listen on 127\.0\.0\.1:{port}: the port is taken"):
            place.take_place(settings, settings.coordinator_address)
        assert not connections(port)
        with socket.create_connection(("127.0.0.1", port)):
            assert len(connections(port) or ()) == 1


def test_an_error_of_a_connection_that_is_caught_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    services: list[subprocess.Popen[bytes]] = []
    start = coordinator.start
    monkeypatch.setattr(coordinator, "start", lambda *a, **k: services.append(start(*a, **k)) or services[-1])
    jax.devices()  # a notebook has used a device; JAX refuses to connect then
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RuntimeError, match="initialize"):
        initialize(coordinator_address=address, num_processes=2, process_id=0)
    assert [service.poll() for service in services] == [-signal.SIGKILL]
    # Its thread would end this process after the limit.
    wait_for(lambda: "jaxpp_flax connecting" not in {each.name for each in threading.enumerate()}, "its end", 10.0)
    monkeypatch.setattr(place, "_WAIT_FOR_PORT_SECONDS", 0.0)
    settings = LaunchSettings(coordinator_address=address, num_processes=2, process_id=0)
    place.take_place(settings, address).close()


@pytest.mark.parametrize(
    ("host", "says"),
    [("192.0.2.1", r"this host has no such address \(.*\)\. Give all"), ("127.0.0.1", r"the port is taken\. Give all")],
)
def test_a_service_that_cannot_listen_ends_process_0_at_once(tmp_path: Path, host: str, says: str):
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from jaxpp_flax.launch import coordinator, initialize\n"
        "coordinator.is_taken = lambda port: False  # nobody has it yet when this process looks\n"
        "initialize(coordinator_address=sys.argv[1], num_processes=2, process_id=0, bind_address='127.0.0.1',\n"
        "           initialization_timeout_s=60)\n",
        encoding="utf-8",
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        with started(tmp_path, ["script.py", address]) as run:
            assert run.finish() == 1
    text = f"jaxpp_flax: the coordination service of process 0 cannot listen on {address}: {says}"
    assert re.search(text, run.stderr), run.stderr


def test_settings_that_are_incomplete_are_refused():
    with pytest.raises(LaunchError, match="JAXPP_FLAX_LAUNCH is incomplete or wrong"):
        LaunchSettings.from_environment({"JAXPP_FLAX_LAUNCH": '{"process_id": 1}'})


def test_one_process_needs_no_connection():
    assert initialize(coordinator_address="127.0.0.1:1", num_processes=1, process_id=0).process_count == 1


def test_a_port_is_not_lost_when_a_start_fails(capsys: pytest.CaptureFixture[str]):
    before, handler = set(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT)
    for _ in range(3):
        assert main(["--address", "192.0.2.1", "-n", "2", __file__]) == 2
    capsys.readouterr()
    wait_for(lambda: len(set(os.listdir("/proc/self/fd"))) <= len(before), "the end of all descriptors", 10.0)
    assert signal.getsignal(signal.SIGINT) is handler  # not the default one where the tests run in the background


def test_chosen_accelerators_go_before_those_of_the_cluster(monkeypatch: pytest.MonkeyPatch):
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[7-10]")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1,2")
    assert _compat.detect_cluster(1) == _compat.ClusterPlace("node7:61443", 4, 3, (0, 1, 2))
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS")
    assert _compat.detect_cluster(1) == _compat.ClusterPlace("node7:61443", 4, 3, (3,))


def test_a_jax_without_the_store_is_for_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(_compat, "_distributed_state", None)
    assert main(["-n", "2", __file__]) == 2
    assert "which has no public name" in capsys.readouterr().err
    with pytest.raises(LaunchError, match=r"cannot run on JAX \d.*tested with"):
        initialize(coordinator_address="127.0.0.1:4321", num_processes=2, process_id=0)


@pytest.mark.parametrize(
    ("listens", "says"),
    [(False, "nothing listens there; process 0 has not started"), (True, "other processes are still missing")],
    ids=["wrong address", "alone"],
)
def test_who_cannot_connect_says_so_soon_and_why(tmp_path: Path, listens: bool, says: str):
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from jaxpp_flax.launch import initialize\n"
        "from jaxpp_flax.launch.process import waiting\n"
        "waiting._SECONDS_IN_SILENCE = 1.0\n"
        "initialize(coordinator_address=sys.argv[1], num_processes=2, process_id=1, initialization_timeout_s=4)\n",
        encoding="utf-8",
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with started(tmp_path, ["script.py", address]) as run:
            assert run.finish() == 1
    text = f"jaxpp_flax: process 1 did not connect to all 2 processes through {address} within {{}} s: .*{says}"
    for seconds, then in (("1", r".* It waits for up to 4 s\."), ("2", ""), ("4", r".* Check that all of them run")):
        assert re.search(text.format(seconds) + then, run.stderr), run.stderr
