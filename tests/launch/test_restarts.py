"""`--max-restarts`: after a failure all processes start again, and the run ends as one that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.launch.running import QUICK, Run, launched, started

pytestmark = pytest.mark.processes

# Each step is noted as the trainer does. Index 1 fails as the test says, in its first life or in each.
BEGIN = """
import os, signal, sys, time
from jaxpp_flax.processes.group import process_group
group = process_group()
index, attempt = group.process_index, group.attempt
print("pid", os.getpid(), "attempt", attempt, "run", group.run_id)
def steps(first, last):
    for step in range(first, last + 1):
        group.note_step(step)
        group.barrier(f"step {step}")
"""


def ends(run: Run) -> str:
    """What the launcher said itself."""
    return "\n".join(line for line in run.stderr.splitlines() if line.startswith("jaxpp_flax.launch: "))


def test_a_killed_process_is_started_again_with_all_others(tmp_path: Path):
    source = BEGIN + (
        "steps(1 if attempt == 1 else 3, 4)\n"
        "if attempt == 1 and index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "group.barrier('end')\nsteps(5, 6)\n"
    )
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "1") as run:
        assert run.finish() == 0, run.stderr
        for index in range(2):
            assert re.findall(rf"^\[{index}\] pid \d+ attempt (\d)", run.stdout, re.MULTILINE) == ["1", "2"]
        assert len(set(re.findall(r" run (\w+)", run.stdout))) == 1
        killed, went_on = ends(run).splitlines()
        assert killed == (
            "jaxpp_flax.launch: process 1 of 2 failed first: it was killed by SIGKILL. That was at step 4; restart 1 "
            "of 1."
        )
        assert re.fullmatch(
            r"jaxpp_flax.launch: life 2 goes on from the checkpoint of step 2: 2 steps repeated, "
            r"step 4 after \d+\.\d s\.",
            went_on,
        )
        run.check_nothing_is_left()


@pytest.mark.parametrize(
    ("reached", "lives"), [("2", 2), ("2 + attempt if attempt < 3 else 4", 3), ("0", 1)], ids=["same", "later", "none"]
)
def test_an_exception_is_tried_again_only_if_a_later_step_was_reached(tmp_path: Path, reached: str, lives: int):
    source = BEGIN + f"steps(1, {reached})\nif index == 1:\n    raise KeyError('bad luck')\ntime.sleep(1000)\n"
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "5") as run:
        assert run.finish() == 1
        assert run.stdout.count("attempt") == 2 * lives
        assert run.stderr.rstrip().endswith("[1] KeyError: 'bad luck'")  # its own message is the last
        assert f"restart {lives}" not in run.stderr
        run.check_nothing_is_left()


def test_the_count_begins_anew_with_a_later_step(tmp_path: Path):
    # Further in its second life, and not in its third.
    source = BEGIN + (
        "steps(1, 1 if attempt == 1 else 2)\ngroup.barrier('here')\n"
        "if index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)\n"
    )
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "1") as run:
        assert run.finish() == 128 + signal.SIGKILL
        assert run.stdout.count("attempt 3") == 2
        assert "attempt 4" not in run.stdout
        assert run.stderr.count("restart 1 of 1") == 2
        run.check_nothing_is_left()


def test_a_life_without_steps_says_so(tmp_path: Path):
    source = BEGIN + "if attempt == 1:\n    steps(1, 3)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    with launched(tmp_path, source, "-n", "1", "--max-restarts", "1") as run:
        assert run.finish() == 0, run.stderr
        last = ends(run).splitlines()[-1]
        assert re.fullmatch(r"jaxpp_flax.launch: life 2 ran no steps, and ended well after \d+\.\d s\.", last)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whom", ["the launcher", "process 1"])
def test_who_asks_for_the_end_gets_it(tmp_path: Path, number: int, whom: str):
    source = BEGIN + "steps(1, 2)\nprint('waits')\nwhile True:\n    time.sleep(0.05)\n"
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "3") as run:
        run.wait_for_output("waits", times=2)
        run.popen.send_signal(number) if whom == "the launcher" else run.kill(1, number)
        assert run.finish() == 128 + number
        assert "attempt 2" not in run.stdout
        run.check_nothing_is_left()


def test_who_asks_for_the_end_after_a_failure_gets_it(tmp_path: Path):
    # Process 0 asks once the launcher has noticed the end of process 1, and before it starts both again.
    source = BEGIN + (
        "if index == 1:\n    open('victim', 'w').write(str(os.getpid()))\n"
        "steps(1, 2)\n"
        "if index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while os.path.exists('/proc/' + open('victim').read()):\n    time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(1000)\n"
    )
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "3") as run:
        assert run.finish() == 128 + signal.SIGKILL
        assert "process 1 of 2 failed first: it was killed by SIGKILL." in run.stderr
        assert "attempt 2" not in run.stdout
        run.check_nothing_is_left()


def test_training_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        """
import os, signal, sys
import jax
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Callback, Checkpoints
from tests.checkpoint.program import batches, make_trainer

class Losses(Callback):
    def on_metrics(self, trainer, step, metrics):
        print(f"step {step} loss {float(metrics['loss']).hex()}")
        if sys.argv[2] == "killed" and step == 5 and process_group().attempt == 1 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

make_trainer(Checkpoints(sys.argv[1], every=2), stages=2, depth=2).fit(batches(), steps=7, callbacks=[Losses()])
""",
        encoding="utf-8",
    )
    said: dict[str, set[tuple[str, str]]] = {}
    for how in ("killed", "undisturbed"):
        command = [*QUICK, "-n", "2", "--max-restarts", "1", "script.py", str(tmp_path / how), how]
        with started(tmp_path, command) as run:
            assert run.finish() == 0, run.stderr
            said[how] = set(re.findall(r"step (\d+) loss (\S+)$", run.stdout, re.MULTILINE))
            assert ("life 2 goes on from the checkpoint of step " in run.stderr) == (how == "killed"), run.stderr
            run.check_nothing_is_left()
    assert said["killed"] == said["undisturbed"]  # to the last bit
    assert len(said["undisturbed"]) == 7


IN_MEMORY = """
import os, random, signal, sys, threading, time
import jax
from jaxpp_flax.checkpoint.memory.slots import Slots
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Callback, Checkpoints
from tests.checkpoint.program import batches, make_trainer

directory, how = sys.argv[1:]
group = process_group()
index, attempt = group.process_index, group.attempt
print("pid", os.getpid())

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Losses(Callback):
    def on_step(self, trainer, record):
        if how == "soon" and attempt < 4 and index == attempt % 2 and record.step >= 3 * attempt - 1:
            threading.Timer(random.Random(attempt).uniform(0, 0.03), die).start()  # at some moment of the next steps
        time.sleep(0.01)
        print(f"step {record.step} loss {float(record.metrics['loss']).hex()}")

if how == "writing" and index == 1 and attempt < 3:
    # One process is killed when it has changed a slot and not given it its mark; the other one has written its own.
    written = Slots.write
    def write(self, number, serial, values, about):
        if serial >= 2 + 2 * attempt:
            time.sleep(0.2)
            self.reserve(number, 1)[:5000] = 0
            die()
        written(self, number, serial, values, about)
    Slots.write = write

trainer = make_trainer(Checkpoints(directory, memory_every=1), stages=2, depth=2)
trainer.fit(batches(), steps=12, callbacks=[Losses()])
print("in memory", [name for name in os.listdir("/dev/shm") if "jaxpp" in name])
"""


def test_training_goes_on_from_copies_in_memory_to_the_same_weights(tmp_path: Path):
    (tmp_path / "script.py").write_text(IN_MEMORY, encoding="utf-8")
    said: dict[str, set[tuple[str, str]]] = {}
    for how, most in (("soon", 2), ("writing", 2), ("undisturbed", 0)):
        command = [*QUICK, "-n", "2", "--max-restarts", "3", "script.py", str(tmp_path / how), how]
        with started(tmp_path, command) as run:
            assert run.finish() == 0, run.stderr
            said[how] = set(re.findall(r"step (\d+) loss (\S+)$", run.stdout, re.MULTILINE))
            lives = re.findall(r"life \d goes on from the copy in memory of step \d+: (\d) steps? repeated", run.stderr)
            assert len(lives) == (0 if how == "undisturbed" else lives_of(run) - 1), run.stderr
            # The step that was begun, and that of a copy that one of the two had not written yet.
            assert all(int(repeated) <= most for repeated in lives), run.stderr
            assert run.stdout.count("in memory []") == 2
            run.check_nothing_is_left()
    assert said["soon"] == said["writing"] == said["undisturbed"]  # to the last bit
    assert len(said["undisturbed"]) == 12


def lives_of(run: Run) -> int:
    """How many lives a run of two processes had."""
    return run.stdout.count("pid ") // 2


def test_copies_in_memory_end_with_a_launcher_that_is_killed(tmp_path: Path):
    # What its processes held open was all that there was of them.
    source = BEGIN + (
        "held = os.readlink(f'/proc/self/fd/{group.memory_file}')\nprint('file', held)\n"
        "os.posix_fallocate(group.memory_file, 0, 1 << 20)\nprint('waits')\ntime.sleep(1000)\n"
    )
    with launched(tmp_path, source, "-n", "2", "--max-restarts", "1") as run:
        run.wait_for_output("waits", times=2)
        assert run.stdout.count("/memfd:jaxpp_flax (deleted)") == 2
        os.kill(run.popen.pid, signal.SIGKILL)
        run.finish()
        run.check_nothing_is_left()


def test_a_run_that_is_not_started_again_has_no_file_for_copies(tmp_path: Path):
    with launched(tmp_path, BEGIN + "print('file', group.memory_file)\n", "-n", "1") as run:
        assert run.finish() == 0, run.stderr
        assert "file None" in run.stdout
