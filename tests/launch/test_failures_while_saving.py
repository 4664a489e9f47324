"""One of two processes is killed, or cannot write, in the middle of a save or restore: what the other one says."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.running import launched
from tests.launch.test_failures import FAILURE_TIMEOUT

pytestmark = pytest.mark.processes

# Both processes write half of an array. Then one of them gets into trouble, which it alone knows of.
PROGRAM = """
import os, resource, signal, sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxpp_flax.checkpoint import reading
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from tests.checkpoint import at_commit

def half(seed):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
    return jax.make_array_from_callback((2048,), sharding, lambda index: np.full(1024, seed, np.float32))

def trouble(*arguments):
    if trouble_is == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(28, "No space left on device")

victim, trouble_is, during = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = CheckpointStore("run")
store.save(1, {"w": half(1)}, {}, wait=True)
if jax.process_index() == victim:
    print("in trouble soon", flush=True)
    if during == "commit":
        at_commit.hook = trouble
    elif during == "restore":
        reading.pytree_handler = trouble
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
if during == "restore":
    reading.restore(store.path(1), {"w": half(0)})
else:
    store.save(2, {"w": half(2)}, {})
    print("begun", flush=True)
if during == "writing":
    store.wait()
for _ in range(600):  # steps, of which the next one raises what went wrong in the background
    time.sleep(0.1)
    store.check()
"""


@pytest.mark.parametrize(
    ("victim", "trouble", "during", "awaited"),
    [
        (0, "killed", "commit", r"the save of step 2 \(commit\)"),
        (1, "killed", "restore", "the restore of step 1"),
        (0, "cannot write", "commit", r"the save of step 2 \(commit\)"),
        (
            1,
            "cannot write",
            "writing",
            # The thread that writes may not wait for the other process yet: then the loop's wait stands alone.
            r"the end of the save of step 2(; and for the save of step 2 .every process's part.*)?\.$",
        ),
    ],
)
def test_the_other_process_names_the_failure_and_what_it_awaited(
    tmp_path: Path, victim: int, trouble: str, during: str, awaited: str
):
    with launched(
        tmp_path, PROGRAM, "-n", "2", arguments=(str(victim), trouble, during), failure_timeout=FAILURE_TIMEOUT
    ) as run:
        run.wait_for_output("in trouble soon")
        begin = time.monotonic()
        status = run.finish()
        # Not a measurement but the promise.
        assert time.monotonic() - begin < FAILURE_TIMEOUT
        survivor = 1 - victim
        said = "\n".join(re.findall(rf"^\[{survivor}\] (.*)", run.stderr, re.MULTILINE))
        assert "Traceback" not in said
        assert said.count("the run has ended") == 1
        assert re.search(rf"Process {survivor} was waiting for {awaited}", said, re.MULTILINE)
        block = run.stderr.rpartition("\njaxpp_flax.launch: ")[2]
        if trouble == "killed":
            assert status == 128 + signal.SIGKILL
            assert f"the run has ended: process {victim}: it was killed by SIGKILL" in said
        else:
            assert status == 1
            assert f"the run has ended: process {victim}: the save of step 2 failed " in said
            assert "the disk is full" in said
            assert block.startswith(f"process {victim} of 2 failed first")
            assert f"saving to {tmp_path}/run/2 failed: the disk is full" in block
        assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()) == ["1"]
        run.check_nothing_is_left()


# The save of step 3 is committed two seconds after it was begun; meanwhile the data of one process ends in an error.
ERROR_MEANWHILE = """
import itertools, sys, time
from pathlib import Path
import jax
from jaxpp_flax.trainers import Checkpoints
from tests.checkpoint import at_commit
from tests.checkpoint.program import batches, make_trainer

at_commit.hook = lambda: time.sleep(2.0)

def data():
    yield from itertools.islice(batches(), 4)
    if jax.process_index() == int(sys.argv[1]):
        raise RuntimeError("the data has ended badly")
    yield from itertools.islice(batches(), 4, None)

make_trainer(Checkpoints("run", every=3)).fit(data(), steps=8)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_under_way_outlives_the_error_of_one_process(tmp_path: Path, victim: int):
    with launched(
        tmp_path, ERROR_MEANWHILE, "-n", "2", arguments=(str(victim),), failure_timeout=FAILURE_TIMEOUT
    ) as run:
        assert run.finish() == 1
        assert f"process {victim} of 2 failed first" in run.stderr
        assert "RuntimeError: the data has ended badly" in run.stderr
        assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["3"]
        run.check_nothing_is_left()


# What is stored beside the leaves is read by one process alone: a death during this reading must not look like damage.
READ_BY_ONE = """
import jax
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.checkpoint.reading import read_json

store = CheckpointStore("run")
store.save(1, {"step": 1}, {"about": {"n": 9}}, wait=True)
if jax.process_index() == 0:
    print("read", read_json(store.path(1), "about"))
"""


def test_no_process_waits_for_others_where_it_reads_what_stands_beside_the_leaves(tmp_path: Path):
    with launched(tmp_path, READ_BY_ONE, "-n", "2", failure_timeout=FAILURE_TIMEOUT) as run:
        assert run.finish() == 0, run.stderr
        assert "[0] read {'n': 9}\n" in run.stdout
