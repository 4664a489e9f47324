"""Devices that are only described: programs compile for them on any machine, and nothing runs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpp_flax.messages import known_names

__all__ = ["described_devices", "described_mesh"]

_EXAMPLES = "'tpu-v5p:4x4x4' (chips), 'tpu-v6e:8x8' or 'h100-sxm:2x8' (hosts x GPUs of each)"
_TPU = "tpu-"
# How libtpu is told to describe chips: two cores of a v4 are one device, as they are in training.
_TPU_OPTIONS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}
# Without these, libtpu asks the cloud for an attached TPU and complains, and one process alone may load it.
_TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def described_devices(topology: str) -> list[Any]:
    """Return the devices of a named machine, for which `compile` works as for attached devices, and nothing runs.

    Call it before JAX is used in the process for anything else, or set `JAX_PLATFORMS=cpu`. The process must not use an
    attached TPU: settings of libtpu are made for all of it.

    Args:
      topology: `tpu-<generation>:<chips>`, the shape as in the cloud's names: "tpu-v5p:4x4x4", "tpu-v5e:4x8". Or
        `<gpu>:<hosts>x<GPUs of each>`: "h100-sxm:2x8"; with three numbers, the first counts the domains of NVLink. The
        GPUs: a100-80, h100-sxm, h200, b200; a name may be cut short, "h100:2x8".

    Returns:
      The `jax.Device`s, in the order of hosts: an array of them makes a `jax.sharding.Mesh`, see `described_mesh`.

    Raises:
      ModuleNotFoundError: without the compiler; the message has the command that installs it.
      ValueError: for a device or a shape that the compiler does not know.

    Example:
      >>> described_devices("h100-sxm:eight")
      Traceback (most recent call last):
        ...
      ValueError: the topology 'h100-sxm:eight' has no shape. Write 'tpu-v5p:4x4x4' (chips), 'tpu-v6e:8x8' or...
    """
    name, _, shape = topology.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"the topology {topology!r} has no shape. Write {_EXAMPLES}.")
    if name.startswith(_TPU):
        return _tpus(name.removeprefix(_TPU), shape)
    return _gpus(_gpu_named(name), shape)


def described_mesh(topology: str, axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of all devices of a named machine; neighbours in its last axis are neighbours in the machine.

    Args:
      topology: as in `described_devices`.
      axes: the axes and their sizes, "stage" first: `{"stage": 8, "data": 2, "tensor": 4}`.

    Raises:
      ValueError: if the axes need fewer or more devices than there are; and the errors of `described_devices`.

    Example:
      >>> described_mesh("tpu-v5p:4x4x4", {"stage": 0})
      Traceback (most recent call last):
        ...
      ValueError: axes stage=0: give each axis a size of at least 1, such as stage=4, data=2.
    """
    text, needed = ", ".join(f"{name}={size}" for name, size in axes.items()), math.prod(axes.values())
    if not axes or any(size < 1 for size in axes.values()):
        raise ValueError(f"axes {text or '{}'}: give each axis a size of at least 1, such as stage=4, data=2.")
    devices = described_devices(topology)
    if needed != len(devices):
        raise ValueError(
            f"axes {text} take {needed} devices, but {topology} has {len(devices)}. Choose sizes whose product is "
            f"{len(devices)}, or another topology."
        )
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _tpus(generation: str, shape: str) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            'libtpu, which compiles for TPUs, is missing: `pip install "jaxpp-flax[compilers-tpu]"`. No TPU is needed.'
        )
    for setting, value in _TPU_SETTINGS.items():
        os.environ.setdefault(setting, value)
    try:
        return _described("tpu", topology_name=f"{generation}:{shape}", **_TPU_OPTIONS.get(generation, {}))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu describes no TPU {generation!r} of {shape} chips: {error}. Write {_EXAMPLES}."
        ) from error


def _gpus(name: str, shape: str) -> list[Any]:
    sizes = shape.split("x")
    if len(sizes) not in (2, 3) or "0" in sizes:
        raise ValueError(f"the GPUs {name}:{shape} need hosts x GPUs of each host: {name}:2x8 for two hosts of eight.")
    plugin = _cuda_plugin()
    if (installed := version(plugin)) != version("jaxlib"):
        needed = version("jaxlib")
        raise ModuleNotFoundError(
            f"{plugin} {installed} does not fit jaxlib {needed}: `pip install {plugin}=={needed}`."
        )
    if not any(map(_has_cuda_tools, _cuda_folders())):
        raise ModuleNotFoundError(
            "XLA needs `ptxas` and `libdevice` of CUDA to compile for GPUs, and found neither a wheel of them nor "
            "/usr/local/cuda: `pip install nvidia-cuda-nvcc`, or let CUDA_ROOT name the folder of a CUDA toolkit."
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # else the plugin refuses to load without cuDNN
    hosts = [sizes[0], "1"] if len(sizes) == 2 else sizes[:2]  # hosts of eight GPUs are domains of NVLink
    try:
        return _described("cuda", topology="x".join([*hosts, sizes[-1]]), target_config=_target_config(name))
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX has begun to run here without its CUDA plugin, which found no driver or library of CUDA. Describe the "
            "devices before JAX is used for anything else, or set JAX_PLATFORMS=cpu."
        ) from error


@lru_cache
def _topology(platform: str, **options: Any) -> Any:
    return topologies.get_topology_desc(platform=platform, **options)


def _described(platform: str, **options: Any) -> list[Any]:
    """Return the devices; always the same ones, so that meshes of them are equal."""
    return list(_topology(platform, **options).devices)


def _cuda_plugin() -> str:
    """Return the name of the installed package that has XLA's compiler for NVIDIA GPUs."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    raise ModuleNotFoundError(
        'JAX\'s compiler for NVIDIA GPUs is missing: `pip install "jaxpp-flax[compilers-cuda]"`. No GPU is needed.'
    )


def _cuda_folders() -> Iterator[Path]:
    """Yield the folders in which JAX and XLA look for the tools of CUDA."""
    flag = re.search(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    yield from map(Path, filter(None, (flag and flag[1], os.environ.get("CUDA_ROOT"))))
    if (wheels := importlib.util.find_spec("nvidia")) is not None:
        for folder in wheels.submodule_search_locations or ():
            yield from (Path(folder, name) for name in ("cu13", "cuda_nvcc"))
    yield Path("/usr/local/cuda")


def _has_cuda_tools(folder: Path) -> bool:
    return (folder / "bin" / "ptxas").is_file() and any((folder / "nvvm" / "libdevice").glob("libdevice*.bc"))


def _targets() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


def _gpu_named(name: str) -> str:
    """Return the full name of a GPU; one name alone must begin with `name`.

    Example:
      >>> _gpu_named("h100")
      'h100-sxm'
    """
    known = [key for key in _targets() if key != "every"]
    found = [key for key in known if key == name] or [key for key in known if name and key.startswith(name)]
    if len(found) != 1:
        raise ValueError(f"no GPU {name!r} is described.{known_names(name, known)} Write {_EXAMPLES}.")
    return found[0]


def _target_config(name: str) -> str:
    """Return XLA's description of a GPU, a `GpuTargetConfigProto` as text."""
    every, own = _targets()["every"], _targets()[name]
    return _as_proto({**every, **own, "gpu_device_info": every["gpu_device_info"] | own["gpu_device_info"]})


def _as_proto(table: Mapping[str, Any]) -> str:
    """Return a table as the text of a protocol buffer.

    Example:
      >>> _as_proto({"name": "H100", "version": {"major": 9}})
      'name: "H100" version { major: 9 }'
    """
    fields = (
        f"{key} {{ {_as_proto(value)} }}" if isinstance(value, Mapping) else f"{key}: {json.dumps(value)}"
        for key, value in table.items()
    )
    return " ".join(fields)
