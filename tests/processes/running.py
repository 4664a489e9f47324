"""Starts real processes on loopback for a test, waits for them with a deadline, and never leaves one behind."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.launch.settings import device_environment
from tests.processes.prepared import Started, start_program
from tests.running import ROOT, free_port

__all__ = [
    "Ended", "ProcessesError", "join_run", "join_watched_run", "results_of_cases", "run_case", "run_processes",
    "said_of_cases", "start_processes", "tell", "told",
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """One process after its end; `code` is None if the deadline ended it."""

    code: int | None
    output: str
    seconds: float


class ProcessesError(AssertionError):
    """Processes of which not all succeeded."""

    def __init__(self, what: str, ended: list[Ended]) -> None:
        self.ended = ended
        shown = "\n".join(
            f"--- process {i}: {'killed at the deadline' if e.code is None else f'exit code {e.code}'} "
            f"after {e.seconds:.1f} s\n{e.output[-6000:]}"
            for i, e in enumerate(ended)
        )
        super().__init__(f"{what} did not all succeed:\n{shown}")


class Processes:
    """N processes of one program, each with its index; a context manager that ends them all."""

    def __init__(self, count: int, program: Sequence[str], devices: int, environment: Mapping[str, str]) -> None:
        port = free_port()
        self.begun = time.monotonic()
        self.files = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 closed by __exit__
        self.processes: list[Started | subprocess.Popen[bytes]] = []
        # Threads as under the launcher: with fewer, a collective of two devices may hang.
        threads = {k: v for k, v in device_environment(os.environ, devices).items() if k == "NPROC"}
        for index, file in enumerate(self.files):
            own = {
                **os.environ,
                **threads,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "TEST_COORDINATOR": f"127.0.0.1:{port}",
                "TEST_PROCESSES": str(count),
                "TEST_PROCESS": str(index),
                **environment,
            }
            self.processes.append(start_program(program, index=index, environment=own, cwd=ROOT, output=file.fileno()))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for file in self.files:
            file.close()

    def output(self, index: int) -> str:
        """What a process has printed so far."""
        file = self.files[index].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")  # the process writes at the position

    def wait_for_output(self, index: int, text: str, timeout: float = 120.0) -> float:
        """Wait until a process has printed this; the seconds since the start."""
        while text not in self.output(index):
            shown = "\n".join(self.output(i) for i in range(len(self.processes)))
            assert self.processes[index].poll() is None, f"it ended before it printed {text!r}: {shown}"
            assert time.monotonic() - self.begun < timeout, f"no {text!r} in {timeout} s: {shown}"
            time.sleep(0.01)
        return time.monotonic() - self.begun

    def wait(self, timeout: float, after_a_failure: float | None = None, standing: Collection[int] = ()) -> list[Ended]:
        """Wait for all of them until `timeout` seconds after the start, and not longer than `after_a_failure` seconds
        after one has failed; then they are killed. Those of index `standing` cannot end: they are not waited for."""
        ended: dict[int, tuple[int | None, float]] = {}
        awaited = set(range(len(self.processes))) - set(standing)
        while not awaited <= set(ended) and (now := time.monotonic() - self.begun) < timeout:
            for index, process in enumerate(self.processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = (process.returncode, now)
                    if process.returncode and after_a_failure is not None:
                        timeout = min(timeout, now + after_a_failure)
            time.sleep(0.01)
        for index, process in enumerate(self.processes):
            if index not in ended:
                process.kill()
                process.wait()
                ended[index] = (None, timeout)
        return [Ended(ended[i][0], self.output(i), ended[i][1]) for i in range(len(self.processes))]


def start_processes(
    count: int,
    program: str,
    *arguments: str,
    devices: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Processes:
    """Start `count` processes with `devices` virtual CPU devices each: of a script of this folder, or of a module."""
    what = [str(ROOT / "tests" / "processes" / program)] if program.endswith(".py") else ["-m", program]
    return Processes(count, [*what, *arguments], devices, environment or {})


def run_processes(
    count: int,
    program: str,
    *arguments: str,
    devices: int = 1,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run them to their end; gives what each printed.

    Raises:
      ProcessesError: if one fails or does not end in time; it shows what all of them printed.
    """
    with start_processes(count, program, *arguments, devices=devices, environment=environment) as processes:
        ended = processes.wait(timeout, after_a_failure=15.0)
    if any(end.code != 0 for end in ended):
        raise ProcessesError(f"{count} processes of {program} {' '.join(arguments)}", ended)
    return [end.output for end in ended]


@functools.cache
def results_of_cases(
    count: int, script: str, *arguments: str, names: tuple[str, ...], devices: int = 1, transport: str = ""
) -> dict[str, str]:
    """Run cases one after the other in one start of the processes; what went wrong in each, nothing if it passed.

    A script of cases gets their names as JSON in its last argument, and prints "passed NAME" after each. A case that
    fails ends the processes: those after it get a new start.
    """
    environment = {"JAXPP_FLAX_TRANSPORT": transport} if transport else None
    results: dict[str, str] = {}
    while pending := [name for name in names if name not in results]:
        failure = None
        try:
            texts = run_processes(
                count, script, *arguments, json.dumps(pending), devices=devices, environment=environment
            )
        except ProcessesError as error:
            texts, failure = [end.output for end in error.ended], str(error)
        passed = [name for name in pending if all(f"passed {name}\n" in text for text in texts)]
        results |= dict.fromkeys(passed, "")
        if passed != pending:
            missing = next(name for name in pending if name not in passed)
            results[missing] = failure or "the processes ended well without it"
        elif failure is not None:  # after the last case
            results[pending[-1]] = failure
    return results


def told(output: str) -> Any:
    """What a process has told of itself by `tell`."""
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def said_of_cases(output: str) -> dict[str, str]:
    """What a process has said of each case, by `run_case`."""
    return dict(line.removeprefix("case ").split(": ", 1) for line in output.splitlines() if line.startswith("case "))


def tell(found: Any) -> None:
    """For the scripts: what the test is to read, as JSON."""
    print(f"found {json.dumps(found)}", flush=True)


def run_case(name: str, function: Callable[[], Any], *errors: type[Exception]) -> None:
    """For the scripts: say what a case gives; of one that may raise one of these errors, the error, or that it ran."""
    try:
        result = function()
        said = "ran" if errors else result
    except errors as error:
        said = " | ".join(str(error).splitlines())
    print(f"case {name}: {said}", flush=True)


def join_watched_run() -> None:
    """For the scripts: what `join_run` does, by this package's own call, with the watch for a failure within 10 s."""
    from jaxpp_flax.launch import initialize

    initialize(
        coordinator_address=os.environ["TEST_COORDINATOR"],
        num_processes=int(os.environ["TEST_PROCESSES"]),
        process_id=int(os.environ["TEST_PROCESS"]),
        failure_timeout_s=10.0,
    )


def join_run(*, optimized: bool = False) -> None:
    """For the scripts: `jax.distributed.initialize` with what this module put into the environment.

    Args:
      optimized: whether XLA compiles as usual. Otherwise it is asked for less optimization, for scripts that compare
        what has been compiled alike, or with a tolerance that holds for either.
    """
    import jax

    quick = not optimized and os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "0"
    jax.config.update("jax_disable_most_optimizations", quick)
    if os.environ["TEST_PROCESSES"] == "1":
        return
    if os.environ.get("JAXPP_FLAX_TRANSPORT") == "device_put":
        jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{free_port()}")
        jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
    jax.distributed.initialize(
        os.environ["TEST_COORDINATOR"], int(os.environ["TEST_PROCESSES"]), int(os.environ["TEST_PROCESS"])
    )
