"""The file that touches private names of JAX, each with its reason, and with a fallback in public API.

The fallbacks run if a future JAX moves or renames these private names.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Sharding

__all__ = [
    "ClusterPlace",
    "bind_cpu_collectives",
    "coordination_client",
    "coordinator_address",
    "copy_arrays",
    "copy_arrays_public",
    "detect_cluster",
    "device_assignment_type",
    "device_list_type",
    "is_described",
    "is_ordered",
    "needs_devices",
    "nothing_cached",
    "platform_of",
    "poison",
    "private",
    "private_names_in_use",
    "register_array_type",
    "trace_context",
    "why_one_process",
]


def private(module: str, name: str) -> Any:
    """Return a private object of JAX; None if this JAX lacks it."""
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


# The copy takes only this concrete class. It refuses PRNG key arrays, which are jax.Arrays too.
_array_type = private("jax._src.array", "ArrayImpl")
# `jax.device_put` spends most of its time in Python before it reaches this batched copy.
_batched_copy = private("jax._src.lib", "xla_client.batched_copy_array_to_devices_with_sharding")
_always_copy = private("jax._src.lib", "xla_client.ArrayCopySemantics.ALWAYS_COPY")

# `jax.typeof` finds types here: without an entry, `jax.jit` refuses objects that only have `__jax_array__`.
_aval_mappings = private("jax._src.core", "pytype_aval_mappings")
# By these functions `jax.jit` turns an argument of a registered type into a jax.Array before the call.
_canonicalize_handlers = private("jax._src.dtypes", "canonicalize_value_handlers")

# JAX's own list of primitives that cannot be lowered for a mesh without devices; libraries add to this list.
_device_primitives = private("jax._src.dispatch", "prim_requires_devices_during_lowering")
# The primitives of this kind that have a public name; those of cuDNN, on GPUs, have none.
_NEED_DEVICES = frozenset({"pure_callback", "io_callback", "custom_partitioning", "inspect_sharding"})

# JAX's own list of the kinds of side effects that keep their order; libraries add to this one, too.
_ordered_effects = private("jax._src.effects", "ordered_effects")

# The setting of one thread; `jax.config.update` changes it for all of them.
_least_cached_seconds = private("jax._src.config", "persistent_cache_min_compile_time_secs")

# All settings that make `jax.jit` trace again. Some have no public name, and new versions add settings.
_trace_context = private("jax._src.config", "trace_context")

# `jax.experimental.serialize_executable` loads executables for the same devices only: see `_compat_executables.py`.
device_list_type = private("jax._src.lib", "xla_client.DeviceList")
device_assignment_type = private("jax._src.lib", "xla_client.DeviceAssignment")
# The client of devices that `jax.experimental.topologies` describes: it compiles, and runs nothing.
_compile_only_client = private("jax._src.lib", "_jax.CompileOnlyPyClient")

# The key-value store of `jax.distributed` has no public name. It tells who lives, and why a run ended.
_distributed_state = private("jax._src.distributed", "global_state")
# Sets the address on which gloo's collectives on CPU listen.
_xla_bridge = private("jax._src", "xla_bridge")
# The place in a run that SLURM, Open MPI or Kubernetes give this process, before any connection.
_detect_cluster = private("jax._src.clusters.cluster", "ClusterEnv.auto_detect_unset_distributed_params")
# `jax.distributed` can only run its coordination service inside process 0. If process 0 dies, all others end before
# they can say why. With this name the service runs in a process of its own.
_runtime = private("jax._src.lib", "_jax")


def private_names_in_use() -> dict[str, bool]:
    """Return the private features of JAX that this process uses; False means that the public fallback runs."""
    return {
        "array_type": _aval_mappings is not None,
        "batched_copy": _batched_copy is not None,
        "coordination": _distributed_state is not None,
        "coordination_service": _runtime is not None,
        "copies_of_executables": None not in (device_list_type, device_assignment_type),
        "described_devices": _compile_only_client is not None,
        "device_primitives": bool(_device_primitives),
        "ordered_effects": _ordered_effects is not None,
        "trace_context": _trace_context is not None,
    }


def trace_context() -> Hashable:
    """Return JAX's settings and contexts that a trace depends on, as a part of a key; `jax.jit` uses the same key.

    Without JAX's own function all settings are read, also those that change no trace. Contexts without a public name
    stay unseen then: `jax.experimental.compute_on`, XLA metadata, layout modes, the axes of an outer `jax.vmap`.

    Example:
      >>> import jax
      >>> before = trace_context()
      >>> with jax.default_matmul_precision("float32"):
      ...     trace_context() == before
      False
      >>> trace_context() == before
      True
    """
    if _trace_context is not None:
        return _trace_context()
    settings = tuple(getattr(jax.config, name, None) for name in jax.config.values)
    return (*settings, jax.sharding.get_abstract_mesh())


def is_described(device: Any) -> bool:
    """Return whether a device is only described, by a topology: programs compile for it, and nothing can lie on it.

    Example:
      >>> import jax
      >>> is_described(jax.devices()[0])
      False
    """
    if _compile_only_client is not None:
        return isinstance(getattr(device, "client", None), _compile_only_client)
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # no backend has this platform
        return True


def nothing_cached() -> AbstractContextManager[Any]:
    """Return the context in which JAX writes nothing that this thread compiles into its cache on disk.

    What it compiles for described devices it writes there, and then it cannot read it, and warns of each program.
    """
    return nullcontext() if _least_cached_seconds is None else _least_cached_seconds(float("inf"))


def platform_of(device: Any) -> str:
    """Return the platform that a program is lowered for: `cuda` where a device says only `gpu`.

    JAX finds out which one "gpu" means only with a backend, which a described device has not.

    Example:
      >>> import jax
      >>> platform_of(jax.devices("cpu")[0])
      'cpu'
    """
    return str(getattr(device.client, "_raw_platform", device.platform))


def why_one_process() -> str | None:
    """Return why several processes cannot run here, and what to change; None if they can."""
    if _distributed_state is not None:
        return None
    return (
        f"several processes cannot run on JAX {jax.__version__}: they find each other by the key-value store of "
        "jax.distributed, which has no public name, and it is not where this package looks for it. Use a version of "
        "JAX that the package was tested with (`python -m jaxpp_flax.doctor`), or one process."
    )


def coordination_client() -> tuple[Any, int, int] | None:
    """Return the client of JAX's coordination service, this process's index, and the number of processes.

    `jax.process_index` also gives the index, but it starts the backend, which waits for every process.

    Returns:
      None in a single process, or if this JAX hides the service.
    """
    state = _distributed_state
    if getattr(state, "client", None) is None:
        return None
    return state.client, state.process_id, state.num_processes


def coordinator_address() -> str | None:
    """Return host and port of JAX's coordination service; None in a single process, or if this JAX hides it."""
    return getattr(_distributed_state, "coordinator_address", None)


def poison(connection: Any) -> bool:
    """Turn the arrays that a connection of `jax.experimental.transfer` still awaits into errors.

    No public function ends a wait for a peer that hangs; without this one, only the end of the process does.

    Returns:
      Whether it took effect.
    """
    breaker = getattr(connection, "_poison_connection", None)
    if breaker is None:
        return False
    breaker()
    return True


@dataclass(frozen=True)
class ClusterPlace:
    """The place of this process in a cluster."""

    coordinator_address: str
    process_count: int
    process_index: int
    local_device_ids: tuple[int, ...] | None


def detect_cluster(timeout_s: int) -> ClusterPlace | None:
    """Find this process's place among the processes that SLURM, Open MPI, Kubernetes or a TPU pod started.

    Returns:
      None outside of a cluster, or if this JAX hides its detection: then `jax.distributed.initialize` detects it.
    """
    chosen = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    devices = [int(number) for number in chosen.split(",")] if chosen else None
    arguments = (os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, devices, None, timeout_s)
    try:
        inspect.signature(_detect_cluster).bind(*arguments)
    except TypeError:
        return None
    # Its own errors pass through: they say what is wrong with the cluster.
    address, count, index, devices = _detect_cluster(*arguments)
    if address is None or count is None or index is None:
        return None
    return ClusterPlace(address, count, index, None if devices is None else tuple(devices))


def bind_cpu_collectives(host: str) -> bool:
    """Let gloo's collectives listen on `host`. By default gloo listens on the address of the host's name.

    Call this after `jax.distributed.initialize` and before the first use of a device.

    Returns:
      Whether it took effect.
    """
    if _xla_bridge is None or _runtime is None:
        return False

    def make_client() -> Any:
        collectives = None
        implementation = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
        if implementation == "gloo":
            collectives = _runtime.make_gloo_tcp_collectives(
                distributed_client=_distributed_state.client, hostname=host
            )
        return _xla_bridge.make_cpu_client(collectives=collectives)

    try:
        _xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
        return True
    except (AttributeError, TypeError, RuntimeError):
        return False


def register_array_type(cls: type[Any], abstract: Callable[[Any], Any], convert: Callable[[Any], jax.Array]) -> bool:
    """Let `jax.jit` and `jax.numpy` take instances of `cls` as arguments.

    Args:
      cls: the type.
      abstract: returns an instance's type for JAX, that of `convert(instance)`.
      convert: returns the array that stands for an instance.

    Returns:
      Whether it took effect. If not, users convert by `jnp.asarray(x)`, and operators work as before.
    """
    if _aval_mappings is None:
        return False
    try:
        _aval_mappings[cls] = abstract
        _canonicalize_handlers[cls] = convert
    except (TypeError, AttributeError):
        return False
    return True


def needs_devices(primitive: Any) -> bool:
    """Return whether JAX lowers this primitive only for known devices; public names are a part of JAX's own list."""
    return primitive in (_device_primitives or ()) or primitive.name in _NEED_DEVICES


def is_ordered(effect: Any) -> bool:
    """Return whether a side effect of an equation keeps its order: by JAX's own list, or by the names of JAX's classes.

    Example:
      >>> import jax
      >>> trace = jax.make_jaxpr(lambda x: jax.debug.print("{}", x, ordered=True))(1.0)
      >>> [is_ordered(effect) for equation in trace.eqns for effect in equation.effects]
      [True]
    """
    if _ordered_effects is not None:
        return bool(_ordered_effects.contains(effect))
    return type(effect).__name__.startswith("Ordered")


@lru_cache(maxsize=65536)
def _device_list_for(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Any:
    """Return the private device list of `target` if shard i of `source` is shard i of `target`, else None."""
    if not (source.is_fully_addressable and target.is_fully_addressable):
        return None
    if (source.memory_kind or "device") != (target.memory_kind or "device"):  # device memory has two names
        return None
    before = tuple(source.devices_indices_map(shape).values())
    after = tuple(target.devices_indices_map(shape).values())
    if before != after:
        return None
    # The copy needs this private type; only the sharding can make it, once per pair of shardings.
    return getattr(target, "_internal_device_list", None)


def copy_arrays(arrays: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Copy each array to the devices of its sharding, without waiting for any of them.

    The results are committed, and independent of the sources, which may be donated or deleted as soon as this function
    returns, even if source and target are the same devices. An array that differs from its target in partition is
    resharded.

    Measured with 4 arrays of 4 KiB on 2 busy CPU cores: 80 microseconds, where `copy_arrays_public` takes 320.

    Raises:
      ValueError: if the two sequences differ in length.
      RuntimeError: if an array has been donated or deleted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> target = jax.sharding.SingleDeviceSharding(jax.devices()[1])
      >>> [copy] = copy_arrays([jnp.arange(3)], [target])
      >>> copy.devices() == {jax.devices()[1]}
      True
    """
    if _batched_copy is None or len(arrays) != len(shardings):
        return copy_arrays_public(arrays, shardings)
    device_lists: list[Any] = []
    for array, sharding in zip(arrays, shardings, strict=True):
        devices = None
        # A deleted array also takes the public way, which raises an error; the batched copy would crash. It would also
        # leave an array uncommitted, whose next operation would move it to the first device.
        if type(array) is _array_type and array.committed and not array.is_deleted():
            devices = _device_list_for(array.sharding, sharding, array.shape)
        if devices is None:
            return copy_arrays_public(arrays, shardings)
        device_lists.append(devices)
    return _batched_copy(arrays, device_lists, shardings, [_always_copy] * len(arrays))


def copy_arrays_public(arrays: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Do `copy_arrays` through `jax.device_put` alone: the same results, three to twenty times slower to dispatch."""
    if len(arrays) != len(shardings):
        raise ValueError(
            f"copy_arrays got {len(arrays)} arrays and {len(shardings)} shardings; pass one for each array."
        )
    results = jax.device_put(list(arrays), list(shardings), may_alias=False)
    # If `device_put` has to reshard, it reuses shards that are already in place, even with `may_alias=False`.
    shared = [i for i, array in enumerate(arrays) if _reshards_in_place(array, shardings[i])]
    if shared:
        own = jax.device_put([results[i] for i in shared], [shardings[i] for i in shared], may_alias=False)
        for i, array in zip(shared, own, strict=True):
            results[i] = array
    return results


def _reshards_in_place(array: jax.Array, target: Sharding) -> bool:
    """Return whether array and target differ in partition and share some devices."""
    source = getattr(array, "sharding", None)  # NumPy arrays have none
    if source is None or source.device_set.isdisjoint(target.device_set):
        return False
    return not source.is_equivalent_to(target, array.ndim)
