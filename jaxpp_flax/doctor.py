"""Check this installation, and measure how fast processes exchange arrays: ``python -m jaxpp_flax.doctor``.

A single process starts two others on this machine for the measurement. With several processes
(``python -m jaxpp_flax.launch -n 4 -m jaxpp_flax.doctor``, or ``--cluster`` in a job), it measures between these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxpp_flax import _compat
from jaxpp_flax.engine.runtime.transport.cupy_nccl import load_cupy, nccl_version
from jaxpp_flax.launch.job import Job
from jaxpp_flax.launch.supervision import run
from jaxpp_flax.processes.group import ProcessGroup, process_group

__all__ = ["Finding", "examine", "main", "measure"]

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
_SIZES = {"4 KiB": 4 << 10, "64 MiB": 64 << 20}
_TRIPS = 8
_PATIENCE = 120.0
_HANGING_NCCL = {(2, 30, 7)}
_NVIDIA_GPU = Path("/dev/nvidia0")


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

    def __str__(self) -> str:
        return f"{'✗' if self.remedy else '✓'} {self.subject}: {self.text}{self.remedy and f'. To do: {self.remedy}'}"


def versions() -> list[Finding]:
    """List the installed packages beside the tested versions."""
    findings = [Finding("Python", f"{sys.version.split()[0]} (tested: 3.11 and 3.13)")]
    for package, tested in {"jaxpp-flax": (), **TESTED_VERSIONS}.items():
        try:
            beside = f" (tested: {' to '.join(dict.fromkeys(tested))})" if tested else ""
            findings.append(Finding(package, importlib.metadata.version(package) + beside))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "not installed", f"pip install {package}"))
    if hidden := sorted(name for name, used in _compat.private_names_in_use().items() if not used):
        lacks = f"this JAX lacks {', '.join(hidden)}: copies are slower, or several processes do not work"
        findings.append(Finding("JAX internals", lacks, "install one of the tested versions of JAX"))
    return findings


def devices(group: ProcessGroup) -> list[Finding]:
    """List the backend and its devices, and look for GPUs that JAX does not use."""
    try:
        local, everywhere = jax.local_devices(), jax.devices()
    except RuntimeError as error:
        return [Finding("devices", f"no backend: {error}", "unset JAX_PLATFORMS, or install the backend that it names")]
    kinds = [device.device_kind for device in local]
    text = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in sorted({*kinds}))
    findings = [Finding("backend", jax.default_backend()), Finding("devices of this process", text)]
    if group.process_count > 1:
        findings.append(Finding("processes", f"{group.process_count}, with {len(everywhere)} devices in all"))
    wants_cpu = "cpu" in os.environ.get("JAX_PLATFORMS", "").lower()
    if jax.default_backend() == "cpu" and _NVIDIA_GPU.exists() and not wants_cpu:
        unused = "this machine has an NVIDIA GPU, and JAX computes on the CPU"
        findings.append(Finding("GPU", unused, "pip install 'jaxpp-flax[cuda13]' (or cuda12)"))
    return findings


def known_faults(environment: Mapping[str, str]) -> list[Finding]:
    """Look for what is known to stop runs of several processes: no transfers, versions of NCCL, proxies."""
    findings: list[Finding] = []
    if importlib.util.find_spec("jax.experimental.transfer") is None:
        findings.append(Finding("transport: transfer", "missing from this JAX", "install another version of JAX"))
    if importlib.util.find_spec("cupy") is not None:
        findings.append(_nccl())
    proxies = sorted(name for name in environment if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    if proxies and "127.0.0.1" not in environment.get("no_proxy", environment.get("NO_PROXY", "")):
        text = f"{', '.join(proxies)} may redirect connections between processes (not those of the local launcher)"
        findings.append(Finding("proxy", text, "add the hosts of the run to no_proxy"))
    return findings


def _nccl() -> Finding:
    try:
        cupy, library = load_cupy()
    except (ImportError, RuntimeError) as error:
        return Finding("transport: nccl", f"does not load: {error}", "see the error" if _NVIDIA_GPU.exists() else "")
    version = nccl_version(library)
    remedy = "pip install another version of nvidia-nccl-cu12 (or -cu13), or use JAXPP_FLAX_TRANSPORT=device_put"
    text = f"CuPy {cupy.__version__} with NCCL {'.'.join(map(str, version))}"
    hangs = version in _HANGING_NCCL
    return Finding("transport: nccl", text + ", which is reported to hang" * hangs, remedy * hangs)


def measure(group: ProcessGroup) -> list[Finding]:
    """Send arrays from process 0 to each other process and back, through JAX's transfer server.

    Every process of the run must call this. In processes other than 0 the result is empty.
    """
    from jax.experimental import transfer

    address = os.environ.get("JAXPP_FLAX_BIND_ADDRESS", "127.0.0.1")
    host = f"[{address}]" if ":" in address else address
    server: Any = transfer.start_transfer_server(jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"])
    addresses = group.exchange("the doctor's addresses", server.address().encode(), _PATIENCE)
    findings: list[Finding] = []
    for peer in range(1, group.process_count):
        if group.process_index in (0, peer):
            connection = server.connect(addresses[peer if group.process_index == 0 else 0].decode())
            for number, (size, nbytes) in enumerate(_SIZES.items()):
                seconds = _round_trip(group, server, connection, peer, peer * 100 + number, nbytes) / 2
                speed = f"{seconds * 1e6:,.0f} µs, {nbytes / seconds / 1e6:,.0f} MB/s"
                findings.append(Finding(f"{size} between processes 0 and {peer}", speed))
        group.barrier("the doctor's measurement", _PATIENCE)
    return findings if group.process_index == 0 else []


def _round_trip(group: ProcessGroup, server: Any, connection: Any, peer: int, number: int, nbytes: int) -> float:
    """Send an array from process 0 to ``peer`` and back; return the median of the seconds that this takes."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    array = jax.device_put(np.zeros(nbytes // 4, np.float32), sharding)
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    times: list[float] = []
    for trip in range(_TRIPS + 1):
        there = (number * 10_000 + trip) * 2
        back = there + 1
        begin = time.perf_counter()
        if group.process_index == 0:
            server.await_pull(there, [array])
            _pull(group, connection, back, shape, peer)
        else:
            server.await_pull(back, [_pull(group, connection, there, shape, 0)])
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first trip opens the connection


def _pull(group: ProcessGroup, connection: Any, number: int, shape: jax.ShapeDtypeStruct, peer: int) -> jax.Array:
    [array] = connection.pull(number, [shape])
    deadline = time.monotonic() + _PATIENCE
    with group.waiting(f"{shape.size * 4} bytes of the doctor's measurement", on=peer):
        while not array.is_ready():
            group.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {peer} sent nothing for {_PATIENCE:g} s")
            time.sleep(0)  # the other process may share this core
    return array


def measure_here() -> list[Finding]:
    """Measure between two processes that this process starts on this machine, without its accelerators."""
    out, errors = io.StringIO(), io.StringIO()
    job = Job(program=["-m", "jaxpp_flax.doctor", "--probe"], num_processes=2)
    status = run(job, out=out, console=Console(file=errors, width=1000))
    found = [line.partition("✓ ")[2].partition(": ") for line in out.getvalue().splitlines() if "✓ " in line]
    if status != 0 or not found:
        text = "\n".join(["they could not exchange arrays:", *errors.getvalue().strip().splitlines()[-15:]])
        remedy = "see the error; usual causes are a firewall on loopback, and a proxy without no_proxy=127.0.0.1"
        return [Finding("two processes", text, remedy)]
    return [Finding(subject, text) for subject, _, text in found]


def examine(group: ProcessGroup) -> list[Finding]:
    """Run all checks, without the measurement."""
    return [*versions(), *devices(group), *known_faults(os.environ)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure and print; return 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.doctor", description=__doc__)
    parser.add_argument("--no-processes", action="store_true", help="leave out the measurement between processes")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe:
        # It asks whether two processes reach each other. A machine may have one GPU, which the doctor itself holds.
        jax.config.update("jax_platforms", "cpu")
    group = process_group()
    findings = [] if options.probe else examine(group)
    if options.probe or group.process_count > 1:
        findings += measure(group)
    elif not options.no_processes and "devices" not in {finding.subject for finding in findings}:
        findings += measure_here()
    wrong = [finding for finding in findings if finding.remedy]
    if group.process_index == 0:
        print(*findings, sep="\n")
        if not options.probe:
            print(f"{len(wrong)} to fix" if wrong else "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
