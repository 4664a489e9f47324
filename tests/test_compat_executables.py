"""An executable is compiled once and copied for other devices: the same bits, or no copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import _compat_executables
from jaxpp_flax._compat_executables import Original, compile_original
from tests.helpers import cache_on_disk

OPTIONS = {"xla_cpu_enable_fast_math": False}


def submesh(rank: int, size: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[size * rank : size * (rank + 1)]), ("data",))


def lowered_for(mesh: Mesh, function: Callable[..., Any]) -> Any:
    sharding = NamedSharding(mesh.abstract_mesh, P("data"))
    new = lambda x, y: function(x, y)  # noqa: E731 - JAX finds an earlier compilation of the same function in memory
    jitted = jax.jit(new, in_shardings=(sharding, sharding), donate_argnums=0)
    return jitted.trace(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).lower(lowering_platforms=("cpu",))


def mixing(x: jax.Array, y: jax.Array) -> Any:
    return jnp.tanh(x @ y) + x, jnp.sum(x, 0), jnp.linalg.cholesky(y @ y.T + 8 * jnp.eye(8))


def operands(mesh: Mesh) -> list[jax.Array]:
    return [jax.device_put(jnp.sin(jnp.arange(64.0).reshape(8, 8) + i), NamedSharding(mesh, P("data"))) for i in (0, 1)]


def compiled_on(mesh: Mesh) -> Original:
    return compile_original(lowered_for(mesh, mixing), tuple(mesh.devices.flat), OPTIONS)


def check_copy(original: Original, mesh: Mesh) -> None:
    """It has the bits, the shardings, the donation and the memory of an executable that is compiled for `mesh`."""
    copy, there = original.copy_for(mesh), compiled_on(mesh).compiled
    x, y = operands(mesh)
    results = copy(x, y)
    assert x.is_deleted()
    for ours, theirs in zip(results, there(*operands(mesh)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == theirs.sharding
        assert ours.devices() == set(mesh.devices.flat)
    assert copy.memory_analysis().temp_size_in_bytes == there.memory_analysis().temp_size_in_bytes
    assert copy.input_shardings == there.input_shardings


@pytest.fixture(autouse=True)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[bool]:
    """JAX's cache on disk, new and empty; or none."""
    used = getattr(request, "param", False)
    with cache_on_disk(tmp_path, used=used):
        yield used


with_and_without_disk = pytest.mark.parametrize("disk", [False, True], indirect=True, ids=["no disk", "disk"])


@pytest.mark.parametrize(("disk", "size"), [(False, 2), (True, 1)], indirect=["disk"])
def test_a_copy_equals_an_executable_compiled_for_its_devices(size: int):
    original = compiled_on(submesh(0, size))
    assert original.origin is not None
    assert original.origin.loaded_from is None
    check_copy(original, submesh(1, size))
    original.compiled(*operands(submesh(0, size)))  # it stays in use


@pytest.mark.parametrize("disk", [True], indirect=True)
def test_threads_copy_one_executable_at_once():
    compiled_on(submesh(0))
    jax.clear_caches()
    original = compiled_on(submesh(0))
    with ThreadPoolExecutor(8) as threads:
        copies = list(threads.map(lambda _: original.copy_for(submesh(1)), range(24)))
    found = [np.asarray(jax.tree.leaves(copy(*operands(submesh(1))))[0]) for copy in copies]
    expected = np.asarray(jax.tree.leaves(original.compiled(*operands(submesh(0))))[0])
    assert all(np.array_equal(each, expected) for each in found)


def test_no_copy_for_its_own_devices():
    original = compiled_on(submesh(1))
    assert original.copy_for(submesh(1)) is original.compiled


@with_and_without_disk
def test_what_jax_loaded_from_disk_is_copied_from_disk(disk: bool):
    """Loaded, serialized and loaded again, an executable computes something else, without an error."""
    compiled_on(submesh(0))
    jax.clear_caches()
    again = compiled_on(submesh(0))
    assert again.origin is not None
    assert (again.origin.loaded_from is not None) is disk
    check_copy(again, submesh(1))


@pytest.mark.parametrize("disk", [True], indirect=True)
def test_no_event_of_jax_decides_what_is_copied(monkeypatch: pytest.MonkeyPatch):
    """JAX may rename the events of its cache, or leave them out: a loaded executable is never taken for a new one."""
    compiled_on(submesh(0))
    jax.clear_caches()
    monkeypatch.setattr(import_module("jax._src.monitoring"), "record_event", lambda *_, **__: None)
    check_copy(compiled_on(submesh(0)), submesh(1))


class Spy:
    """XLA's client, with a record of the executables that it loads and of those that it serializes."""

    def __init__(self, client: Any) -> None:
        self.client, self.loaded, self.serialized = client, list[Any](), list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def deserialize_executable(self, *arguments: Any) -> Any:
        self.loaded.append(self.client.deserialize_executable(*arguments))
        return self.loaded[-1]

    def serialize_executable(self, executable: Any) -> Any:
        self.serialized.append(executable)
        return self.client.serialize_executable(executable)


@pytest.mark.parametrize("disk", [True], indirect=True)
def test_a_loaded_executable_is_never_serialized():
    compiled_on(submesh(0))
    jax.clear_caches()
    lowered = lowered_for(submesh(0), mixing)
    spy = lowered._lowering.compile_args["backend"] = Spy(lowered._lowering.compile_args["backend"])
    original = compile_original(lowered, tuple(submesh(0).devices.flat), OPTIONS)
    copies = [original.copy_for(submesh(rank)) for rank in (1, 2)]
    assert [executable.runtime_executable() for executable in (original.compiled, *copies)] == spy.loaded
    assert not spy.serialized


def test_what_did_not_come_from_the_client_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    """JAX may give an executable out of its memory, or make it by another method of the client."""
    monkeypatch.setattr(
        _compat_executables._Client, "compile_and_load", property(lambda self: self.real.compile_and_load)
    )
    original = compiled_on(submesh(0))
    assert original.origin is None
    assert original.copy_for(submesh(1)) is None
    original.compiled(*operands(submesh(0)))


def test_a_jax_that_takes_its_own_client_alone(monkeypatch: pytest.MonkeyPatch):
    def refusing(*_: Any, **__: Any) -> Any:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(_compat_executables._Client, "compile_and_load", refusing)
    original = compiled_on(submesh(0))
    assert original.origin is None
    original.compiled(*operands(submesh(0)))


@pytest.mark.parametrize(
    ("setting", "value"), [("jax_optimization_level", "O0"), ("jax_persistent_cache_min_compile_time_secs", 7.0)]
)
def test_settings_of_a_compilation(setting: str, value: Any):
    before = _compat_executables.compile_settings(), getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        assert _compat_executables.compile_settings() != before[0]
    finally:
        jax.config.update(setting, before[1])
    assert _compat_executables.compile_settings() == before[0]


def test_a_program_that_is_compiled_again():
    lowered = lowered_for(submesh(0), mixing)
    devices = tuple(submesh(0).devices.flat)
    for _ in range(2):
        check_copy(compile_original(lowered, devices, OPTIONS), submesh(1))


def test_no_copy_of_what_is_bound_to_python_objects_or_devices():
    def with_callback(x: jax.Array, y: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return x + y

    mesh = submesh(0, 1)
    lowered = jax.jit(with_callback).lower(*operands(mesh))
    assert compile_original(lowered, tuple(mesh.devices.flat), None).copy_for(submesh(1, 1)) is None
    one_device = jax.jit(mixing).lower(jnp.eye(8), jnp.eye(8))
    assert compile_original(one_device, tuple(jax.devices()[:1]), None).copy_for(submesh(1, 1)) is None


@pytest.mark.parametrize("name", ["device_list_type", "device_assignment_type"])
def test_no_copy_without_the_private_names(monkeypatch: pytest.MonkeyPatch, name: str):
    assert compiled_on(submesh(0)).copy_for(submesh(1)) is not None
    monkeypatch.setattr(_compat_executables, name, None)
    original = compiled_on(submesh(0))
    assert original.copy_for(submesh(1)) is None
    original.compiled(*operands(submesh(0)))
