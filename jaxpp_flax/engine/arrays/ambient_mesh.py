"""The mesh that JAX sees while a step is traced: the mesh of one stage. An outer `jax.set_mesh` has no effect."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh

from jaxpp_flax._compat import trace_context
from jaxpp_flax._compat_texts.errors import MeshFault, mesh_fault, names_axes, names_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh

__all__ = ["context_mesh", "trace_for_stages", "trace_settings", "without_ambient_mesh"]

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def context_mesh(mesh: AbstractMesh | None) -> Generator[None, None, None]:
    """Set JAX's context mesh to `mesh` (None: no mesh), even inside `jax.set_mesh` with another mesh.

    Example:
      >>> import numpy as np
      >>> with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))), context_mesh(None):
      ...     jax.sharding.get_abstract_mesh().empty
      True
    """
    # `use_abstract_mesh` alone refuses a mesh whose size differs from the mesh before it.
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh) if mesh is not None else nullcontext():
        yield


def without_ambient_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run without the mesh of a `jax.set_mesh` around its call.

    JAX compares the devices of all arrays with those of that mesh, and compiles for it. For functions that compute with
    arrays at places of their own, and that call no code of the user except in a trace.

    Example:
      >>> import numpy as np
      >>> @without_ambient_mesh
      ... def sees_mesh():
      ...     return not jax.sharding.get_abstract_mesh().empty
      >>> with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))):
      ...     sees_mesh()
      False
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        with ExitStack() as context:
            with suppress(ValueError):  # in a trace, where arrays have no devices, JAX sets no mesh
                context.enter_context(context_mesh(None))
            return function(*args, **kwargs)

    return called


def trace_settings() -> Hashable:
    """Return JAX's settings for the key of a traced step. A mesh of `jax.set_mesh` changes no step: it is left out.

    Example:
      >>> import numpy as np
      >>> before = trace_settings()
      >>> with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))):
      ...     trace_settings() == before
      True
    """
    with context_mesh(None):
        return trace_context()


def trace_for_stages(trace: Callable[[AbstractMesh], T], mesh: MpmdMesh) -> T:
    """Trace a step under the submesh, because each stage runs on the submesh.

    In `jax.shard_map` and in shardings that are types, JAX lets a step name only the mesh of the context. A step that
    names the whole mesh is therefore traced again, under the whole mesh; `on_submesh` then moves the result.

    Raises:
      ValueError: the step's own, from the trace under the submesh. If a stage lacks the mesh or axis that the step
        names, the message says what to change.
    """
    whole = mesh.jax_mesh.abstract_mesh
    try:
        with context_mesh(mesh.abstract_submesh):
            return trace(mesh.abstract_submesh)
    except ValueError as error:
        refused = error
    if names_axes(refused, whole.shape) and whole != mesh.abstract_submesh:  # any other error would come again
        try:
            with context_mesh(whole):
                return trace(whole)
        except ValueError as error:
            if not names_mesh(error):
                raise
    remedy = _remedy(refused, mesh)
    if remedy is None:
        raise refused
    raise ValueError(f"{remedy}; the line is in the traceback of the error above.") from refused


def _remedy(error: ValueError, mesh: MpmdMesh) -> str | None:
    """Return advice for an error of JAX about meshes; None for other errors."""
    fault = mesh_fault(error)
    if fault is MeshFault.UNKNOWN_AXIS:
        axes = [name for name in mesh.jax_mesh.axis_names if name != mesh.mpmd_axis_name]
        return (
            f"the step constrains a value to a mesh axis that does not exist: {error} In a stage a constraint may name "
            f"{axes}. Use one of these, or make a mesh that has the axis"
        )
    if fault is MeshFault.EXPLICIT_ONLY:
        names = mesh.jax_mesh.axis_names
        return (
            f"the step asks for a sharding that JAX takes on Explicit axes only: {error} Use "
            "jax.lax.with_sharding_constraint there, or make the mesh as jax.sharding.Mesh(devices, "
            f"{names}, axis_types=(jax.sharding.AxisType.Explicit,) * {len(names)})"
        )
    if fault is MeshFault.ANOTHER_MESH:
        return (
            f"the step names a mesh beside that of a stage, {dict(mesh.abstract_submesh.shape)}: {error} Leave `mesh=` "
            "out of jax.shard_map, write shardings as PartitionSpecs, or make both of `mpmd_mesh.lowering_mesh()`"
        )
    return None
