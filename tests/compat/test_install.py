"""`jaxpp_flax.compat.install()` puts the stand-in in the place of `jaxpp`, once and for all of its submodules."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib import import_module

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api
import jaxpp_flax.compat


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves `jaxpp` behind."""
    before = {name for name in sys.modules if name == "jaxpp" or name.startswith("jaxpp.")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name == "jaxpp" or name.startswith("jaxpp.")]:
        del sys.modules[name]


def test_imports_of_all_versions():
    jaxpp_flax.compat.install()
    jaxpp_flax.compat.install()
    import jaxpp  # pyright: ignore[reportMissingImports]
    import jaxpp.api as api  # pyright: ignore[reportMissingImports]
    from jaxpp.array import filter_axes  # pyright: ignore[reportMissingImports]
    from jaxpp.arrayref import ArrayRef  # pyright: ignore[reportMissingImports]
    from jaxpp.core import DistributedSharding, mpmd_jit_with_loop  # pyright: ignore[reportMissingImports]
    from jaxpp.distributed_utils import distributed_main  # pyright: ignore[reportMissingImports]
    from jaxpp.experimental import mpmd  # pyright: ignore[reportMissingImports]
    from jaxpp.experimental.mpmd import task  # pyright: ignore[reportMissingImports]
    from jaxpp.mesh import MpmdMesh, RemoteMpmdMesh  # pyright: ignore[reportMissingImports]
    from jaxpp.schedules import BaseSchedule  # pyright: ignore[reportMissingImports]
    from jaxpp.types import MpmdSharding, TaskType  # pyright: ignore[reportMissingImports]

    assert jaxpp.api is api is jaxpp_flax.api
    assert mpmd is import_module("jaxpp.experimental.mpmd") is import_module("jaxpp_flax.tasks")
    assert task is mpmd.task
    assert jaxpp.__version__ == jaxpp_flax.__version__
    assert mpmd_jit_with_loop is api.mpmd_jit_with_loop
    assert BaseSchedule is api.BaseSchedule
    assert MpmdMesh is api.MpmdMesh
    assert DistributedSharding is MpmdSharding is api.MpmdSharding
    assert TaskType is api.TaskType
    assert callable(distributed_main)
    for kind in (ArrayRef, RemoteMpmdMesh):
        assert not isinstance(object(), kind)
        with pytest.raises(NotImplementedError, match=f"no {kind.__name__} can be made: it "):
            kind()
    sharding = NamedSharding(Mesh(jax.devices()[:1], ("stage",)), P("stage", None))
    assert filter_axes(sharding, {"stage"}).spec == P(None, None)


def test_nothing_is_installed_unasked():
    with pytest.raises(ModuleNotFoundError):
        import_module("jaxpp")


def test_another_jaxpp_is_refused():
    sys.modules["jaxpp"] = types.ModuleType("jaxpp")
    with pytest.raises(RuntimeError, match=r"jaxpp is imported already, from an unknown place\. Call"):
        jaxpp_flax.compat.install()
