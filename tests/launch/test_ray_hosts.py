"""`--ray`: a program on hosts of a Ray cluster, here several raylets of this machine, some of which are killed.

`pytest -m soak tests/launch/test_ray_hosts.py` does harm to runs at random moments; a seed takes about half a minute.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpp_flax.launch.cli import main
from jaxpp_flax.launch.host.host import HostReport
from jaxpp_flax.launch.host.supervised_process import ProcessState
from jaxpp_flax.launch.ray import hosts
from tests.launch.running import QUICK, REAL, Run, marked, parent, started
from tests.running import MARK, ROOT, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:os.fork")]  # Ray forks its own programs

OWN_MARK = f"ray {os.getpid()}"  # another process may run these tests as well

BEGIN = """
import os, signal, sys, time
import jax
print("pid", os.getpid(), "devices", jax.device_count(), flush=True)
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Callback, Checkpoints, MeshOptions
from tests.checkpoint.program import batches, make_trainer
group = process_group()
index, attempt = group.process_index, group.attempt
"""

# Life 1 ends by a killed process, life 2 stands still until its host is killed, life 3 until a host has come.
TRAINING = (
    BEGIN
    + """
class Story(Callback):
    def on_metrics(self, trainer, step, metrics):
        print(f"step {step} loss {float(metrics['loss']).hex()}", flush=True)
        if sys.argv[2] == "undisturbed":
            return
        if (attempt, step) in ((2, 5), (3, 7)):
            print("waits", flush=True)
            while not os.path.exists(f"{sys.argv[1]}.{attempt}"):
                time.sleep(0.1)
        if (attempt, step, index) in ((1, 3, 1), (3, 7, 0)):
            os.kill(os.getpid(), signal.SIGKILL)

# The stages stay, and so do their programs and all bits: three devices have two stages each, two have three.
options = {"schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=jax.device_count(), axes={})}
make_trainer(Checkpoints(sys.argv[1], every=1), stages=6, depth=6, **options).fit(
    batches(), steps=9, callbacks=[Story()]
)
"""
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and three hosts; Ray knows a silent host within seconds."""
    utilities = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("period_ms", "1000"), ("timeout_ms", "2000"), ("failure_threshold", "2")):
            patch.setenv(f"RAY_health_check_{name}", value)
        patch.setenv("RAY_worker_niceness", "0")  # else what runs beside the test comes before the hosts
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv(MARK, OWN_MARK)
        patch.delenv("XLA_FLAGS", raising=False)
        made = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(3):
                made.add_node(num_cpus=1)
            yield made
        finally:
            made.shutdown()


@contextmanager
def on_ray(cluster: Any, folder: Path, source: str, *options: str, arguments: tuple[str, ...] = ()) -> Iterator[Run]:
    (folder / "script.py").write_text(source, encoding="utf-8")
    command = [*REAL, "--ray", *options, "script.py", *arguments]
    with started(folder, command, RAY_ADDRESS=cluster.address) as run:
        yield run
    # The driver has the test's mark, and what Ray has started that of the cluster.
    left = "jaxpp_flax.launch"
    wait_for(lambda: not any(left in line for line in marked(OWN_MARK).values()), "the end of the hosts' interpreters")


def losses(run: Run) -> set[tuple[str, str]]:
    return set(re.findall(r"step (\d+) loss (\S+)$", run.stdout, re.MULTILINE))


def undisturbed(folder: Path, source: str, steps: int, processes: int = 2) -> set[tuple[str, str]]:
    """The losses of processes to which nothing happens."""
    (folder / "script.py").write_text(source, encoding="utf-8")
    command = [*QUICK, "-n", str(processes), "script.py", str(folder / "here"), "undisturbed"]
    with started(folder, command) as run:
        assert run.finish() == 0, run.stderr
    assert len(losses(run)) == steps
    return losses(run)


@pytest.mark.extras
@pytest.mark.slow
def test_a_run_survives_a_process_and_a_host_and_takes_a_new_host_in(cluster: Any, tmp_path: Path):
    options = ("--hosts", "3", "--min-hosts", "2", "--wait", "3", "--max-restarts", "1")
    with on_ray(cluster, tmp_path, TRAINING, *options, arguments=(str(tmp_path / "on_ray"), "disturbed")) as run:
        run.wait_for_output("waits")
        lost = next(iter(cluster.worker_nodes))
        cluster.remove_node(lost, allow_graceful=False)
        run.wait_for_output("waits", times=4)
        cluster.add_node(num_cpus=1)
        (tmp_path / "on_ray.3").touch()
        assert run.finish() == 0, run.stderr
        hosts = re.findall(r"life (\d) has \d processes on (\d) hosts", run.stderr)
        assert hosts == [("1", "3"), ("2", "3"), ("3", "2"), ("4", "3")], run.stderr
        assert "process 1 of 3 failed first: it was killed by SIGKILL." in run.stderr
        assert re.search(rf"host \S+ \(.*node {lost.node_id[:8]}\) is lost, with process \d of 3: ", run.stderr)
        assert "process 0 of 2 failed first: it was killed by SIGKILL." in run.stderr
        assert len(re.findall(r"life \d goes on from the checkpoint of step", run.stderr)) == 3
        assert len(re.findall(r"\] pid \d+ devices 2", run.stdout)) == 2
    assert losses(run) == undisturbed(tmp_path, TRAINING, 9, processes=3)  # to the last bit, on three hosts and on two
    assert len(losses(run)) == 9


# A life waits at a step until its host is killed, or processes of it.
IN_MEMORY = (
    BEGIN
    + """
class Story(Callback):
    def on_step(self, trainer, record):
        print(f"step {record.step} loss {float(record.metrics['loss']).hex()}", flush=True)
        if str(record.step) in sys.argv[2].split(",") and str(record.step) == str(3 * attempt):
            print("waits", flush=True)
            while True:
                time.sleep(0.1)
        time.sleep(0.02)

options = {"schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=jax.device_count(), axes={})}
make_trainer(Checkpoints(sys.argv[1], memory_every=1), stages=6, depth=6, **options).fit(
    batches(), steps=8, callbacks=[Story()]
)
"""
)


@pytest.fixture(scope="module")
def in_memory_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), IN_MEMORY, 8)


def lives_from_memory(run: Run) -> int:
    """How many lives went on from copies in memory."""
    before_a_beginning = run.stderr.partition("goes on from the beginning")[0]  # later lives repeat more
    text = r"life \d goes on from the copy in memory of step \d+: (\d+) steps? repeated"
    repeated = re.findall(text, before_a_beginning)
    # The step under way, and one whose copy the next host did not have yet.
    assert all(int(steps) <= 2 for steps in repeated), run.stderr
    return len(repeated)


def kill_hosts(cluster: Any, run: Run, life: int, places: Sequence[int]) -> None:
    """Kill the raylets of a life's hosts, by their places in it, with all that they have started."""
    (named,) = re.findall(rf"life {life} has .* hosts: (.*)", run.stderr)
    nodes = re.findall(r"node (\w{8})\)", named)
    for node in list(cluster.worker_nodes):
        if node.node_id[:8] in [nodes[place] for place in places]:
            cluster.remove_node(node, allow_graceful=False)


@pytest.mark.extras
def test_the_state_of_a_killed_host_is_in_the_memory_of_the_next_one(
    cluster: Any, tmp_path: Path, in_memory_undisturbed: set[tuple[str, str]]
):
    options = ("--hosts", "2", "--max-restarts", "1")
    with on_ray(cluster, tmp_path, IN_MEMORY, *options, arguments=(str(tmp_path / "on_ray"), "3")) as run:
        run.wait_for_output("waits", times=2)
        kill_hosts(cluster, run, 1, [0])
        cluster.add_node(num_cpus=1)
        assert run.finish() == 0, run.stderr
    assert lives_from_memory(run) == 1, run.stderr
    assert losses(run) == in_memory_undisturbed  # to the last bit


@pytest.mark.extras
@pytest.mark.slow
def test_copies_in_memory_serve_fewer_hosts_until_one_is_left(
    cluster: Any, tmp_path: Path, in_memory_undisturbed: set[tuple[str, str]]
):
    options = ("--hosts", "3", "--min-hosts", "1", "--wait", "2", "--max-restarts", "1")
    with on_ray(cluster, tmp_path, IN_MEMORY, *options, arguments=(str(tmp_path / "on_ray"), "3,6")) as run:
        for life, waiting in ((1, 3), (2, 5)):
            run.wait_for_output("waits", times=waiting)
            kill_hosts(cluster, run, life, [0])
        assert run.finish() == 0, run.stderr
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    assert lives_from_memory(run) == 2, run.stderr
    assert losses(run) == in_memory_undisturbed  # to the last bit, on three hosts, on two, and on one
    assert "the copies of the state in memory are on this host alone" in run.stdout + run.stderr


@pytest.mark.extras
@pytest.mark.slow
def test_if_two_neighbours_are_lost_the_checkpoint_is_used(
    cluster: Any, tmp_path: Path, in_memory_undisturbed: set[tuple[str, str]]
):
    options, source = (
        ("--hosts", "3", "--max-restarts", "1"),
        IN_MEMORY.replace("memory_every", "every=1, memory_every"),
    )
    with on_ray(cluster, tmp_path, source, *options, arguments=(str(tmp_path / "on_ray"), "3")) as run:
        run.wait_for_output("waits", times=3)
        kill_hosts(cluster, run, 1, [0, 1])
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        assert run.finish() == 0, run.stderr
    assert "the copies in memory are not used: of no step are those of all processes left" in run.stdout + run.stderr
    assert "life 2 goes on from the checkpoint of step" in run.stderr
    assert losses(run) == in_memory_undisturbed


RANDOM_STEPS = 40


@pytest.fixture(scope="module")
def random_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), random_source("memory_every=1"), RANDOM_STEPS)


def random_source(checkpoints: str) -> str:
    """`IN_MEMORY` with more steps, and the options of its checkpoints."""
    return IN_MEMORY.replace("steps=8", f"steps={RANDOM_STEPS}").replace("memory_every=1", checkpoints)


def strike(cluster: Any, run: Run, kind: str, life: int, places: Sequence[int]) -> None:
    """Do harm to these hosts of a life, or to the process that each of them has."""
    if kind == "kill host":
        kill_hosts(cluster, run, life, places)
        for _ in places:
            cluster.add_node(num_cpus=1)
        return
    victims = [run.process_ids()[place] for place in places]
    if kind.endswith("actor"):
        victims = [parent(process) for process in victims]
    assert all(victim > 1 for victim in victims), victims
    for victim in victims:
        os.kill(victim, signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL)


@pytest.mark.extras
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_random_harm_to_hosts_changes_no_loss(
    cluster: Any, tmp_path: Path, random_undisturbed: set[tuple[str, str]], seed: int
):
    rng = random.Random(seed)
    hosts, faults = rng.choice([2, 2, 3]), rng.choice([1, 1, 2, 3])
    checkpoints = rng.choice(["memory_every=1", "every=1, memory_every=1", "every=2"])
    # Without copies no process needs its actor: a stopped one is noticed too late.
    actor = ["kill actor", "stop actor"] if "memory" in checkpoints else ["kill actor"]
    options = ("--hosts", str(hosts), "--max-restarts", str(faults), "--failure-timeout", "10")
    arguments = (str(tmp_path / "on_ray"), "")
    with on_ray(cluster, tmp_path, random_source(checkpoints), *options, arguments=arguments) as run:
        printed = 0
        for life in range(1, faults + 1):
            kind = rng.choice(["kill process", "stop process", *actor, "kill host", "kill host"])
            # One host stays: what all processes have printed may be lost with all actors.
            places = rng.sample(range(hosts), rng.choice([1, 1, 1, 2]) if hosts == 3 else 1)
            moment = rng.choice(["start", "compile", "step", "step"])
            wait_for(lambda: f"life {life} has" in run.stderr, "a life")  # noqa: B023
            if (moment, kind) != ("start", "kill host"):
                run.wait_for_output("] pid ", hosts, printed)
            if moment == "step":
                done = max((int(step) for step, _ in losses(run)), default=0)
                run.wait_for_output(f"step {done + rng.randrange(1, 7)} loss", hosts, printed)
            time.sleep(rng.uniform(0.0, 1.0 if moment == "compile" else 0.1))
            print(f"life {life}: {kind} of hosts {places} at {moment}", flush=True)
            printed = len(run.stdout)
            strike(cluster, run, kind, life, places)
            wait_for(lambda: f"life {life + 1} has" in run.stderr or run.popen.poll() is not None, "a life")  # noqa: B023
        assert run.finish() == 0, run.stderr
    assert run.stderr.count("; restart ") == faults, run.stderr
    assert losses(run) == random_undisturbed  # to the last bit
    lives_from_memory(run)


@pytest.mark.extras
def test_an_error_and_ctrl_c_end_the_run(cluster: Any, tmp_path: Path):
    source = BEGIN + (
        "group.note_step(1)\ngroup.barrier('here')\nprint('waits', flush=True)\n"
        "if index == 1 and sys.argv[1] == 'error':\n    raise KeyError('bad luck')\ntime.sleep(1000)\n"
    )
    options = ("--hosts", "2", "-n", "2", "--max-restarts", "3")
    with on_ray(cluster, tmp_path, source, *options, arguments=("error",)) as run:
        assert run.finish() == 1, run.stderr
        assert run.stderr.count("life 2 has 4 processes on 2 hosts") == 1  # it had come to a step
        assert "life 3" not in run.stderr
        assert run.stderr.rstrip().endswith("[1] KeyError: 'bad luck'")  # its own message is the last
    with on_ray(cluster, tmp_path, source, *options, arguments=("wait",)) as run:
        run.wait_for_output("waits", times=4)
        run.popen.send_signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT, run.stderr
        assert "life 2" not in run.stderr


@pytest.mark.extras
def test_what_no_host_can_run_is_refused(cluster: Any, tmp_path: Path):
    with on_ray(cluster, tmp_path, "", "--hosts", "9", "--wait", "1") as run:
        assert run.finish() == 2
        assert re.search(r"Ray has given \d of 9 hosts with \{'CPU': 1.0\} within 1 s \(--wait\); 9 are", run.stderr)


@pytest.mark.extras
def test_a_script_runs_from_python_too(cluster: Any, tmp_path: Path):
    (tmp_path / "script.py").write_text("import os, sys\nprint(*sys.argv, os.environ['MINE'])\n", encoding="utf-8")
    (tmp_path / "driver.py").write_text(
        "from jaxpp_flax.launch import LaunchError\nfrom jaxpp_flax.launch.ray import run\n"
        "print('status', run('script.py', '7', hosts=1, num_processes=2, environment={'MINE': 'yours'}))\n"
        "try:\n    run('absent.py', hosts=1)\nexcept LaunchError as error:\n    print(error)\n",
        encoding="utf-8",
    )
    with started(tmp_path, [sys.executable, "driver.py"], RAY_ADDRESS=cluster.address) as run:
        assert run.finish() == 0, run.stderr
        assert sorted(run.stdout.splitlines()) == [
            "[0] script.py 7 yours", "[1] script.py 7 yours", "status 0", "there is no file 'absent.py' to run.",
        ]  # fmt: skip


def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str]):
    for options, text in (
        (["--ray"], "--ray needs the number of hosts, as in `--ray --hosts 4 train.py`"),
        (["--ray", "--hosts", "0"], "--hosts 0: at least one host is needed"),
        (["--ray", "--hosts", "2", "--min-hosts", "3"], "--min-hosts 3: it must be 1 to 2 (--hosts)"),
        (["--ray", "--hosts", "2", "--wait", "-1"], "--wait -1.0: it must be a number of seconds, 0 or more"),
        (["--ray", "--hosts", "2", "--address", "10.0.0.1"], "--address and --ray exclude each other"),
        (["-n", "2", "--hosts", "2", "--wait", "3"], "--hosts, --wait: for --ray alone"),
        (["--cluster", "--gpus", "1"], "--gpus and --cluster exclude each other"),
    ):
        assert main([*options, __file__]) == 2
        assert text in capsys.readouterr().err


def test_without_ray_the_command_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--ray", "--hosts", "2", __file__]) == 2
    assert "pip install 'jaxpp-flax[ray]'" in capsys.readouterr().err


def test_a_host_that_answers_one_call_after_another_is_not_given_up(monkeypatch: pytest.MonkeyPatch):
    clock, ready, killed = [0.0], set[str](), list[Any]()
    report = HostReport((ProcessState(0),))
    ray = SimpleNamespace(
        wait=lambda calls, timeout: ([call for call in calls if call in ready], []),
        get=lambda call: ("10.0.0.1:4000", report, []), kill=killed.append,
        exceptions=SimpleNamespace(RayError=RuntimeError, RayTaskError=KeyError),
    )  # fmt: skip
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda method, *_: method))
    head = SimpleNamespace(check=lambda: None, is_lost=False)
    monkeypatch.setattr(hosts.time, "monotonic", lambda: clock[0])
    host = hosts.RayHost(ray, actor, "a", "node", None, head, 5.0)  # type: ignore[arg-type]
    host.prepare()
    host.start(None)  # type: ignore[arg-type]
    host.poll()
    clock[0] = 8.0  # it has imported until now
    ready.add("prepare")
    host.poll()
    clock[0] = 12.0
    host.poll()
    assert host.lost is None
    clock[0] = 14.0
    host.poll()
    assert host.lost == "it has not answered for 5 s."
    assert killed == [actor]


def test_the_end_of_a_host_is_awaited_without_blocking(monkeypatch: pytest.MonkeyPatch):
    clock, ready = [0.0], set[str]()
    ray = SimpleNamespace(
        wait=lambda calls, timeout: ([call for call in calls if call in ready and timeout == 0], []),
        get=lambda call: ("", HostReport(), []), kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=RuntimeError, RayTaskError=KeyError),
    )  # fmt: skip
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda method, *_: method))
    head = SimpleNamespace(check=lambda: None, is_lost=False)
    monkeypatch.setattr(hosts.time, "monotonic", lambda: clock[0])
    both = [hosts.RayHost(ray, actor, name, "node", None, head, 5.0) for name in "ab"]  # type: ignore[arg-type]
    for host in both:
        host.end()
    assert [host.has_ended() for host in both] == [False, False]
    clock[0] = 5.5
    assert both[0].has_ended()
    assert both[0].lost == "it has not answered for 5 s."
    ready.add("end")
    assert both[1].has_ended()
    assert both[1].lost is None
