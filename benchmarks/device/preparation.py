"""What the kit needs is found here, or refused with all that is missing at once, before anything is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "RefusedError", "environment_of", "examined", "install_wheels"]

ROOT = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 120.0
DOWNLOAD = (
    "python -m pip download -d wheels --only-binary=:all: --python-version {python} --platform manylinux_2_28_x86_64 "
    "--platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 {packages}"
)


class RefusedError(Exception):
    """The kit cannot run here."""


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def install_wheels(wheels: Path, site: Path) -> list[str]:
    """Install into `site` those wheels of a folder whose packages are not installed yet; return their names."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise RefusedError(f"--wheels {wheels}: there are no wheels in it")
    missing = [file for file in files if not _is_installed(file.name.split("-")[0])]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
        done = subprocess.run([*pip, *map(str, missing)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError(f"--wheels {wheels}: pip could not install them:\n{done.stderr.strip()}")
    return [file.name.split("-")[0] for file in missing]


def environment_of(platform: str, site: Path) -> dict[str, str]:
    """The environment of every part: this checkout, the packages in `site`, and the platform."""
    if not _is_installed("jaxpp-flax"):  # a clone that is not installed has no version
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        folder = site / f"jaxpp_flax-{project['version']}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: jaxpp-flax\nVersion: {project['version']}\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""), str(site)]
    return {
        **os.environ,
        "JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


def examined(platform: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions and devices, found by a process of its own.

    Raises:
      RefusedError: saying all that is missing, and how to carry it here.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "device" / "probe.py")]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"--platform {platform}: JAX finds no device within {PROBE_SECONDS:g} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RefusedError(f"the probe ended with status {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    found = json.loads(lines[-1])
    if found["missing"]:
        python = ".".join(found["python"].split(".")[:2])
        download = DOWNLOAD.format(python=python, packages=" ".join(found["missing"]))
        raise RefusedError(
            f"packages are missing: {', '.join(found['missing'])}. Where there is a network: pip install them. Else "
            f"elsewhere `{download}`, carry the folder here, and add `--wheels wheels`; what is installed here stays."
        )
    if found["problem"]:
        raise RefusedError(f"--platform {platform}: {found['problem']}")
    if found["platform"] != platform:
        raise RefusedError(f"--platform {platform}: JAX computes on {found['platform']!r} here")
    return found
