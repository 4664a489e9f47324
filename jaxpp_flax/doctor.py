"""Check this installation, and measure how fast processes exchange arrays: ``python -m jaxpp_flax.doctor``.

A single process starts two others on this machine for the measurement. With several processes
(``python -m jaxpp_flax.launch -n 4 -m jaxpp_flax.doctor``, or ``--cluster`` in a job), it measures between these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpp_flax import _compat
from jaxpp_flax.engine.runtime.transport.cupy_nccl import load_cupy, local_ordinal, make_one_alone, nccl_version
from jaxpp_flax.launch.local import LocalJob, run
from jaxpp_flax.processes.group import ProcessGroup, process_group

__all__ = ["Finding", "Measurement", "examine", "main", "measure"]

# The oldest and the newest versions with which all tests pass (both ends of what `.ci/run` installs).
TESTED_VERSIONS = {
    "jax": ("0.10.2", "0.12.0.1"),
    "jaxlib": ("0.10.2", "0.12.0.1"),
    "flax": ("0.12.8", "0.12.12"),
    "optax": ("0.2.8", "0.2.8"),
    "orbax-checkpoint": ("0.12.8", "0.12.8"),
    "numpy": ("2.4.6", "2.5.5"),
    "rich": ("15.0.0", "15.0.0"),
}
_OLDEST_JAX = (0, 10)
_SIZES = (4 << 10, 1 << 20, 64 << 20)
_REPETITIONS = {4 << 10: 200, 1 << 20: 40, 64 << 20: 4}
_PROBE_TIMEOUT = 120.0
_HANGING_NCCL = {(2, 30, 7)}
_MEASUREMENT_LINE = "measurement "


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
      subject: what was checked.
      text: the result.
      remedy: what to do; empty if nothing is wrong.
    """

    subject: str
    text: str
    remedy: str = ""

    @property
    def wrong(self) -> bool:
        """True if there is something to do."""
        return bool(self.remedy)


@dataclass(frozen=True)
class Measurement:
    """The time to send an array from one process to another.

    Args:
      source, target: the numbers of the processes.
      nbytes: the size of the array.
      seconds: the time of one way: half of the median time of several round trips.
    """

    source: int
    target: int
    nbytes: int
    seconds: float


def versions() -> list[Finding]:
    """Check the installed packages: their versions, and if they fit each other."""
    findings = [Finding("Python", f"{sys.version.split()[0]} (tested: 3.11 and 3.13)")]
    for package in ("jaxpp-flax", *TESTED_VERSIONS):
        try:
            findings.append(Finding(package, _beside_tested(package, importlib.metadata.version(package))))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "not installed", f"pip install {package}"))
    jax_version, jaxlib_version = jax.__version__, importlib.metadata.version("jaxlib")
    if _numbers(jax_version) < _OLDEST_JAX:
        findings.append(Finding("jax", f"{jax_version} is too old", "pip install -U 'jax>=0.10'"))
    if _numbers(jaxlib_version) > _numbers(jax_version) or _numbers(jaxlib_version)[:2] < _numbers(jax_version)[:2]:
        findings.append(
            Finding("jax", f"jax {jax_version} and jaxlib {jaxlib_version} do not fit", "pip install -U jax jaxlib")
        )
    hidden = sorted(name for name, used in _compat.private_names_in_use().items() if not used)
    if hidden:
        findings.append(
            Finding(
                "JAX internals",
                f"this JAX lacks {', '.join(hidden)}: copies are slower, or several processes do not work",
                "install one of the tested versions of JAX",
            )
        )
    return findings


def _beside_tested(package: str, installed: str) -> str:
    """
    >>> _beside_tested("optax", "9.0")
    '9.0 (tested: 0.2.8; this one is newer)'
    """
    if package not in TESTED_VERSIONS:
        return installed
    oldest, newest = TESTED_VERSIONS[package]
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if _numbers(installed) > _numbers(newest):
        tested += "; this one is newer"
    elif _numbers(installed) < _numbers(oldest):
        tested += "; this one is older"
    return f"{installed} (tested: {tested})"


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.10.2.dev3+abc")
    (0, 10, 2)
    """
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def devices(group: ProcessGroup) -> list[Finding]:
    """Check the backend and its devices, and look for GPUs that JAX does not use."""
    try:
        local, everywhere = jax.local_devices(), jax.devices()
    except RuntimeError as error:
        return [Finding("devices", f"no backend: {error}", "unset JAX_PLATFORMS, or install the backend that it names")]
    kinds = {kind: sum(device.device_kind == kind for device in local) for kind in {d.device_kind for d in local}}
    text = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))
    findings = [Finding("backend", jax.default_backend()), Finding("devices of this process", text)]
    if group.process_count > 1:
        findings.append(Finding("processes", f"{group.process_count}, with {len(everywhere)} devices in all"))
    if jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists() and "cpu" not in _platforms():
        findings.append(
            Finding(
                "GPU",
                "this machine has an NVIDIA GPU, and JAX computes on the CPU",
                "pip install 'jaxpp-flax[cuda13]' (or cuda12)",
            )
        )
    for device in local:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        if limit and used > 0.5 * limit:
            findings.append(
                Finding(
                    f"memory of {device}",
                    f"{used / 2**30:.1f} of {limit / 2**30:.1f} GiB are in use",
                    "end the programs that use it (nvidia-smi shows them)",
                )
            )
    return findings


def _platforms() -> str:
    return os.environ.get("JAX_PLATFORMS", "").lower()


def transports() -> list[Finding]:
    """Check the transports: the ways to send arrays from one process to another."""
    findings: list[Finding] = []
    if importlib.util.find_spec("jax.experimental.transfer") is None:
        findings.append(Finding("transport: transfer", "missing from this JAX", "install another version of JAX"))
    else:
        findings.append(Finding("transport: transfer", "found (the default on CPU)"))
    backend = _backend()
    found = "needs accelerators" if backend in (None, "cpu") else "found (the default on accelerators)"
    return [*findings, Finding("transport: device_put", found), *nccl(has_gpus=backend == "gpu")]


def _backend() -> str | None:
    try:
        return jax.default_backend()
    except RuntimeError:  # there is none, as `devices` has said
        return None


def nccl(*, has_gpus: bool) -> list[Finding]:
    """Check that NCCL loads through CuPy, its version, and that it can make a communicator.

    Args:
      has_gpus: True if JAX computes on GPUs. Otherwise a missing NCCL is not counted as wrong.
    """
    subject = "transport: nccl"
    if importlib.util.find_spec("cupy") is None:
        return [Finding(subject, "not installed (cupy; extras cuda12, cuda13)")]
    try:
        cupy, library = load_cupy()
        version = nccl_version(library)
    except (ImportError, RuntimeError) as error:
        return [Finding(subject, f"does not load: {error}", "see the error" if has_gpus else "")]
    text = f"CuPy {cupy.__version__} with NCCL {'.'.join(map(str, version))}"
    if version in _HANGING_NCCL:
        remedy = "pip install another version of nvidia-nccl-cu12 (or -cu13), or use JAXPP_FLAX_TRANSPORT=device_put"
        return [Finding(subject, f"{text}, which is reported to hang", remedy)]
    if not has_gpus:
        return [Finding(subject, f"{text}; needs GPUs")]
    problem = _communicator_problem(cupy, library)
    if problem:
        return [Finding(subject, f"{text} cannot make a communicator: {problem}", "NCCL_DEBUG=INFO says more")]
    return [Finding(subject, f"{text}, makes communicators")]


def _communicator_problem(cupy: Any, library: Any) -> str:
    """Return why NCCL cannot make a communicator of this process alone on its first device; empty if it can."""
    device = jax.local_devices()[0]
    made: Future[None] = Future()

    def make() -> None:
        try:
            made.set_result(make_one_alone(cupy, library, local_ordinal(device)))
        except Exception as error:
            made.set_exception(error)

    # NCCL cannot be interrupted where it hangs.
    threading.Thread(target=make, daemon=True).start()
    if not wait([made], timeout=_PROBE_TIMEOUT).done:
        return f"NCCL did not return within {_PROBE_TIMEOUT:g} s"
    error = made.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


def surroundings(environment: Mapping[str, str]) -> list[Finding]:
    """Check the environment for settings that are known to disturb runs with several processes."""
    findings: list[Finding] = []
    named = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}
    proxies = sorted(name for name in environment if name.lower() in named)
    direct = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    if proxies and "127.0.0.1" not in direct:
        findings.append(
            Finding(
                "proxy",
                f"{', '.join(proxies)} may redirect connections between processes (not those of the local launcher)",
                "add the hosts of the run to no_proxy",
            )
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        findings.append(Finding("open files", f"at most {files}", "ulimit -n 4096"))
    for name in ("JAXPP_FLAX_VERIFY", "JAXPP_FLAX_DUMP"):
        if environment.get(name):
            findings.append(Finding(name, "is set, which makes steps slower"))
    return findings or [Finding("surroundings", "no proxy is set, and enough files may be open")]


def measure(group: ProcessGroup, sizes: Sequence[int] = _SIZES) -> list[Measurement]:
    """Send arrays from process 0 to each other process and back, through JAX's transfer server.

    Every process of the run must call this.

    Args:
      group: the processes.
      sizes: bytes of the arrays.

    Returns:
      In process 0, a measurement for each other process and size; in other processes, an empty list.
    """
    from jax.experimental import transfer

    device = jax.local_devices()[0]
    address = os.environ.get("JAXPP_FLAX_BIND_ADDRESS", "127.0.0.1")
    host = f"[{address}]" if ":" in address else address
    server: Any = transfer.start_transfer_server(device.client, f"{host}:0", [f"{host}:0"])
    addresses = group.exchange("the doctor's addresses", server.address().encode(), _PROBE_TIMEOUT)
    measurements: list[Measurement] = []
    for peer in range(1, group.process_count):
        if group.process_index in (0, peer):
            connection = server.connect(addresses[peer if group.process_index == 0 else 0].decode())
            for number, size in enumerate(sizes):
                seconds = _round_trip(group, server, connection, peer, peer * 100 + number, size)
                measurements.append(Measurement(0, peer, size, seconds / 2))
        group.barrier("the doctor's measurement", _PROBE_TIMEOUT)
    return measurements if group.process_index == 0 else []


def _round_trip(group: ProcessGroup, server: Any, connection: Any, peer: int, number: int, size: int) -> float:
    """Send an array from process 0 to ``peer`` and back; return the median of the seconds that this takes."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    array = jax.device_put(np.zeros(size // 4, np.float32), sharding)
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    times: list[float] = []
    for trip in range(_REPETITIONS.get(size, 4) + 1):
        there = (number * 10_000 + trip) * 2
        back = there + 1
        begin = time.perf_counter()
        if group.process_index == 0:
            server.await_pull(there, [array])
            _pull(group, connection, back, shape, peer)
        else:
            received = _pull(group, connection, there, shape, 0)
            server.await_pull(back, [received])
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first trip opens the connection


def _pull(group: ProcessGroup, connection: Any, number: int, shape: jax.ShapeDtypeStruct, peer: int) -> jax.Array:
    [array] = connection.pull(number, [shape])
    deadline = time.monotonic() + _PROBE_TIMEOUT
    with group.waiting(f"{shape.size * 4} bytes of the doctor's measurement", on=peer):
        while not array.is_ready():
            group.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {peer} sent nothing for {_PROBE_TIMEOUT:g} s")
            time.sleep(0)  # the other process may share this core
    return array


def measure_here() -> list[Measurement] | Finding:
    """Measure between two processes that this process starts on this machine; a `Finding` if that fails."""
    out, errors = io.StringIO(), Console(file=io.StringIO(), width=1000)
    status = run(LocalJob(program=["-m", "jaxpp_flax.doctor", "--probe"], num_processes=2), out=out, console=errors)
    lines = [line.partition(_MEASUREMENT_LINE)[2] for line in out.getvalue().splitlines() if _MEASUREMENT_LINE in line]
    if status != 0 or not lines:
        last = errors.file.getvalue().strip().splitlines()[-15:]  # type: ignore[attr-defined]
        return Finding(
            "two processes",
            "\n".join(["they could not exchange arrays:", *last]),
            "see the error; usual causes are a firewall on loopback, and a proxy without no_proxy=127.0.0.1",
        )
    return [Measurement(**json.loads(line)) for line in lines]


def examine(group: ProcessGroup) -> list[Finding]:
    """Run all checks, without the measurement."""
    return [*versions(), *devices(group), *transports(), *surroundings(os.environ)]


def report(findings: Sequence[Finding], measurements: Sequence[Measurement]) -> Table:
    """Return the findings and measurements as a table."""
    table = Table(title="jaxpp_flax doctor", show_lines=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = "[red]✗[/red]" if finding.wrong else "[green]✓[/green]"
        table.add_row(mark, finding.subject, finding.text, finding.remedy)
    for m in measurements:
        size = f"{m.nbytes >> 20} MiB" if m.nbytes >= 1 << 20 else f"{m.nbytes >> 10} KiB"
        speed = f"{m.seconds * 1e6:,.0f} µs, {m.nbytes / m.seconds / 1e6:,.0f} MB/s"
        table.add_row("[green]✓[/green]", f"{size} between processes {m.source} and {m.target}", speed, "")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure and print; return 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.doctor", description=__doc__)
    parser.add_argument("--no-processes", action="store_true", help="leave out the measurement between processes")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    group = process_group()
    if options.probe:
        for measurement in measure(group):
            print(_MEASUREMENT_LINE + json.dumps(asdict(measurement)))
        return 0
    findings = examine(group)
    measurements: list[Measurement] = []
    if group.process_count > 1:
        measurements = measure(group)
    elif not options.no_processes and _backend() is not None:
        measured = measure_here()
        if isinstance(measured, Finding):
            findings.append(measured)
        else:
            measurements = measured
    wrong = [finding for finding in findings if finding.wrong]
    if group.process_index == 0:
        # Not narrower than is legible, where the output is a file or a log.
        console = Console() if sys.stdout.isatty() else Console(width=140)
        console.print(report(findings, measurements))
        console.print(f"{len(wrong)} to fix" if wrong else "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
