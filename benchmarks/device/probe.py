"""What is here, as one line of JSON: versions, devices, and what is missing. The kit runs it as a process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
from importlib.metadata import PackageNotFoundError, version

# What each package is imported as, of the dependencies of the package and of its benchmarks.
NEEDED = {
    "etils": "etils.epath", "flax": "flax", "jax": "jax", "jaxlib": "jaxlib", "numpy": "numpy", "optax": "optax",
    "orbax-checkpoint": "orbax.checkpoint", "rich": "rich", "tensorstore": "tensorstore",
}  # fmt: skip
BESIDE = ("cupy-cuda13x", "cupy-cuda12x", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "pytest", "jaxpp-flax")


def is_found(module: str) -> bool:
    """True if a module could be imported; its parents are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def version_of(package: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    versions = {name: version_of(name) for name in (*NEEDED, *BESIDE)}
    found: dict[str, object] = {
        "python": platform.python_version(),
        "versions": {name: number for name, number in versions.items() if number},
        "missing": [name for name, module in NEEDED.items() if not is_found(module)],
        "problem": "",
        "platform": "",
        "devices": [],
    }
    if not found["missing"]:
        try:
            importlib.import_module("jaxpp_flax.trainers")
            devices = importlib.import_module("jax").devices()
            found["devices"] = [device.device_kind for device in devices]
            found["platform"] = devices[0].platform
        except Exception as error:
            found["problem"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
