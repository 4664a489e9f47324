"""Named machines: what is refused, with what to install, and what compilers are told; `tests/compilers` compiles."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxpp_flax.planning import described_devices, described_mesh
from jaxpp_flax.planning.compilers import described


@pytest.fixture
def topologies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What JAX is asked for, in place of compilers: eight devices of the CPU."""
    asked: list[dict[str, Any]] = []

    def describe(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(devices=jax.devices()[:8])

    monkeypatch.setattr(described.topologies, "get_topology_desc", describe)
    monkeypatch.setattr(described, "_topology", lambda platform, **options: describe(platform=platform, **options))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[]))
    monkeypatch.setattr(described, "version", lambda name: "1.2.3")
    monkeypatch.setattr(described, "_has_cuda_tools", lambda folder: True)
    for name in (*described._TPU_SETTINGS, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "as it was")
    return asked


def test_a_mesh_has_the_axes_in_the_order_of_the_devices(topologies: list[dict[str, Any]]):
    mesh = described_mesh("tpu-v5p:2x2x2", {"stage": 4, "data": 2})
    assert topologies == [{"platform": "tpu", "topology_name": "v5p:2x2x2"}]
    assert dict(mesh.shape) == {"stage": 4, "data": 2}
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_two_cores_of_a_v4_are_one_device(topologies: list[dict[str, Any]]):
    described_devices("tpu-v4:2x2x2")
    assert topologies == [{"platform": "tpu", "topology_name": "v4:2x2x2", "chip_config_name": "megacore"}]


@pytest.mark.parametrize(("name", "shape"), [("h100:2x4", "2x1x4"), ("h100-sxm:1x2x4", "1x2x4"), ("b200:1x8", "1x1x8")])
def test_gpus_are_hosts_times_devices(topologies: list[dict[str, Any]], name: str, shape: str):
    described_devices(name)
    (asked,) = topologies
    assert (asked["platform"], asked["topology"]) == ("cuda", shape)
    assert asked["target_config"].count("{") == asked["target_config"].count("}") > 2
    assert "device_memory_size: " in asked["target_config"]


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ("tpu-v5p", r"the topology 'tpu-v5p' has no shape\. Write 'tpu-v5p:4x4x4' \(chips\)"),
        ("h100-sxm:8", r"h100-sxm:8 need hosts x GPUs of each host: h100-sxm:2x8 for two hosts of eight"),
        ("h100-sxm:0x8", r"need hosts x GPUs of each host"),
        ("h:2x8", r"no GPU 'h' is described\. Known: a100-80, h100-sxm, h200, b200\."),
        ("mi300x:1x8", r"no GPU 'mi300x' is described"),
    ],
)
def test_names_that_say_nothing(topologies: list[dict[str, Any]], topology: str, text: str):
    with pytest.raises(ValueError, match=text):
        described_devices(topology)
    assert not topologies


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"stage": 3}, r"axes stage=3 take 3 devices, but h100:1x8 has 8\. Choose sizes whose product is 8"),
        ({"stage": 8, "data": 2}, r"axes stage=8, data=2 take 16 devices, but h100:1x8 has 8"),
        ({"stage": 0}, r"axes stage=0: give each axis a size of at least 1"),
        ({}, r"axes \{\}: give each axis"),
    ],
)
def test_axes_that_do_not_take_all_devices(topologies: list[dict[str, Any]], axes: dict[str, int], text: str):
    with pytest.raises(ValueError, match=text):
        described_mesh("h100:1x8", axes)


def test_a_topology_that_libtpu_does_not_know(topologies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    def refuse(platform: str, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Invalid TPU external name")

    monkeypatch.setattr(described, "_topology", refuse)
    with pytest.raises(
        ValueError, match=r"libtpu describes no TPU 'v9' of 2x2 chips: INVALID_ARGUMENT: .* Write 'tpu-"
    ):
        described_devices("tpu-v9:2x2")


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxpp-flax\[compilers-tpu\]"'):
        described_devices("tpu-v5p:2x2x2")


def test_without_the_cuda_plugin(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(described, "version", missing)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxpp-flax\[compilers-cuda\]"'):
        described_devices("h100:1x8")


def test_with_the_cuda_plugin_of_another_version(topologies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(described, "version", lambda name: "0.9" if "plugin" in name else version(name))
    match = rf"jax-cuda13-plugin 0\.9 does not fit jaxlib .*`pip install jax-cuda13-plugin=={version('jaxlib')}`"
    with pytest.raises(ModuleNotFoundError, match=match):
        described_devices("h100:1x8")


def test_without_the_tools_of_cuda(topologies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(described, "_has_cuda_tools", lambda folder: False)
    with pytest.raises(ModuleNotFoundError, match=r"needs `ptxas` and `libdevice` .*`pip install nvidia-cuda-nvcc`"):
        described_devices("h100:1x8")


def test_where_the_tools_of_cuda_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/of/a/flag --other=1")
    monkeypatch.setenv("CUDA_ROOT", "/of/a/variable")
    spec = SimpleNamespace(submodule_search_locations=["/site/nvidia"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    expected = ["/of/a/flag", "/of/a/variable", "/site/nvidia/cu13", "/site/nvidia/cuda_nvcc", "/usr/local/cuda"]
    assert [str(folder) for folder in described._cuda_folders()] == expected
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    assert not described._has_cuda_tools(tmp_path)
    (tmp_path / "nvvm" / "libdevice").mkdir(parents=True)
    (tmp_path / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    assert described._has_cuda_tools(tmp_path)


def test_after_jax_has_begun_without_its_plugin(topologies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    def refuse(platform: str, **options: Any) -> Any:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(described, "_topology", refuse)
    with pytest.raises(RuntimeError, match=r"begun to run here without its CUDA plugin.* or set JAX_PLATFORMS=cpu"):
        described_devices("h100:1x8")
