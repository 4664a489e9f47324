"""One compilation for several sets of devices; the second file that touches private names of JAX.

JAX compiles a program once for each set of devices. An executable that XLA has compiled can be serialized, and loaded
with compile options that name other devices: the same bits in a twentieth of the time.

An executable that was itself loaded must not be serialized again: on CPU the copy computes wrong numbers without an
error. So JAX compiles and loads through a client that notes where each executable comes from. Only what XLA compiled is
serialized. What was loaded, from JAX's cache on disk for one, is copied from the bytes that it was loaded from. What
did not come from this client is not copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpp_flax._compat import device_assignment_type, device_list_type, is_described, nothing_cached

# What XLA and JAX's cache on disk are told after a program is lowered. A thread can have values of its own.
_COMPILE_SETTINGS = (
    "jax_compilation_cache_dir", "jax_compilation_cache_expect_pgle", "jax_compilation_cache_include_metadata_in_key",
    "jax_compiler_enable_remat_pass", "jax_enable_compilation_cache", "jax_enable_pgle",
    "jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_memory_fitting_level",
    "jax_optimization_level", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
    "jax_pgle_profiling_runs", "jax_use_shardy_partitioner", "jax_xla_profile_version",
)  # fmt: skip


def compile_settings() -> Hashable:
    """Return the settings of this thread that the compilation of a lowered program depends on.

    Example:
      >>> import jax
      >>> before = compile_settings()
      >>> with jax.default_matmul_precision("float32"):  # a part of what was traced
      ...     compile_settings() == before
      True
    """
    return tuple(getattr(jax.config, name, None) for name in _COMPILE_SETTINGS)


def called_with_few_bits(compiled: Any) -> Any:
    """Let a `jax.stages.Compiled` be called with arrays of numbers below one byte (int4, float4); return it.

    JAX 0.10 refuses such a call: it compares layouts, and those of arrays do not tell how many bits a number has. So
    the layouts of these arguments are not compared, where they are JAX's default. Newer versions need nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.device_put(jnp.ones(2, jnp.int4), jax.devices()[0])
      >>> compiled = called_with_few_bits(jax.jit(lambda x: x.astype(jnp.float32)).lower(x).compile())
      >>> compiled(x)
      Array([1., 1.], dtype=float32)
    """
    executable: Any = getattr(compiled, "_executable", None)
    compared, given = (getattr(executable, name, None) for name in ("_xla_in_layouts", "_dispatch_in_layouts"))
    if compared is None or given is None:
        return compiled
    few_bits = [getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in compared]
    if any(few_bits):
        executable._xla_in_layouts = [
            None if bits and asked is None else layout
            for layout, asked, bits in zip(compared, given, few_bits, strict=True)
        ]
    return compiled


@dataclass(frozen=True, eq=False)
class ExecutableOrigin:
    """Where an executable comes from.

    Attributes:
      client: XLA's client.
      executable: the executable, an object of the client.
      options: XLA's options with which it was compiled or loaded.
      loaded_from: the bytes from which it was loaded; None if XLA compiled it.
    """

    client: Any
    executable: Any
    options: Any
    loaded_from: bytes | None = None

    def load_for(self, devices: Sequence[Any]) -> Any:
        """Load the executable for other devices."""
        options = deepcopy(self.options)
        options.device_assignment = device_assignment_type.create(np.array([[device.id for device in devices]]))
        return self.client.deserialize_executable(self._serialized, device_list_type(tuple(devices)), options)

    @cached_property
    def _serialized(self) -> bytes:
        """The executable as bytes, of which every copy is made."""
        return self.client.serialize_executable(self.executable) if self.loaded_from is None else self.loaded_from


class _Client:
    """XLA's client, and the origin of each executable that it makes."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.origins: list[ExecutableOrigin] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def compile_and_load(self, module: Any, executable_devices: Any, compile_options: Any, **others: Any) -> Any:
        executable = self.real.compile_and_load(
            module, executable_devices=executable_devices, compile_options=compile_options, **others
        )
        self.origins.append(ExecutableOrigin(self.real, executable, compile_options))
        return executable

    def deserialize_executable(self, serialized: bytes, devices: Any, options: Any, *others: Any) -> Any:
        executable = self.real.deserialize_executable(serialized, devices, options, *others)
        self.origins.append(ExecutableOrigin(self.real, executable, options, loaded_from=serialized))
        return executable


@dataclass(frozen=True)
class Original:
    """An executable that can be copied onto other devices.

    Attributes:
      compiled: a `jax.stages.Compiled` for `devices`.
      origin: where its executable comes from; None if that is not known: then nothing is copied.
      seconds: how long its compilation took.
    """

    compiled: Any
    devices: tuple[Any, ...]
    origin: ExecutableOrigin | None
    seconds: float = 0.0

    def copy_for(self, mesh: Mesh) -> Any:
        """Return a `jax.stages.Compiled` for the devices of `mesh`, a mesh of the same shape and axes.

        Returns:
          None if the executable is bound to its devices or to Python objects (callbacks, for one), or if this JAX or
          this platform cannot copy it: then compile once more. The executable itself for its own devices.
        """
        if self.devices == tuple(mesh.devices.flat):
            return self.compiled
        if self.origin is None:
            return None
        try:
            return self._copy_for(mesh, self.origin)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None

    def _copy_for(self, mesh: Mesh, origin: ExecutableOrigin) -> Any:
        unloaded, devices = self.compiled._executable._unloaded_executable, tuple(mesh.devices.flat)
        shardings = [*unloaded.input_shardings, *unloaded.output_shardings]
        bound = (
            *(unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects or unloaded.keepalive),
            *(device for device in self.devices if device.process_index != jax.process_index()),
            *(device for device in devices if device.device_kind != self.devices[0].device_kind),
            *(sharding for sharding in shardings if not isinstance(sharding, NamedSharding)),
            *self.compiled._params.const_args,
        )
        if bound or unloaded.mut or unloaded.pgle_profiler:
            return None
        moved = [NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in shardings]
        loaded = replace(
            unloaded,
            xla_executable=origin.load_for(devices),
            device_list=device_list_type(devices),
            input_shardings=moved[: len(unloaded.input_shardings)],
            output_shardings=moved[len(unloaded.input_shardings) :],
        ).load()
        ours = self.compiled
        return called_with_few_bits(
            jax.stages.Compiled(loaded, [], ours.args_info, ours.out_tree, no_kwargs=ours._no_kwargs)
        )


def compile_original(lowered: Any, devices: Sequence[Any], options: Mapping[str, Any] | None) -> Original:
    """Compile a `jax.stages.Lowered` for devices; `options` are XLA's, as in `jax.jit(compiler_options=)`."""

    def compiled_from(lowered: Any) -> Any:
        return called_with_few_bits(lowered.compile(compiler_options=options, device_assignment=tuple(devices)))

    if is_described(devices[0]):  # JAX knows their client by its class, and nothing is copied
        with nothing_cached():
            return Original(compiled_from(lowered), tuple(devices), None)
    watched = _watched(lowered)
    if watched is not None:
        try:
            compiled = compiled_from(watched)
            return Original(compiled, tuple(devices), _origin_of(compiled))
        except TypeError:  # a JAX that takes its own client alone; any other error comes again
            pass
    return Original(compiled_from(lowered), tuple(devices), None)


def _watched(lowered: Any) -> Any:
    """Return the same program, compiled through a `_Client`; None if this JAX has other private names."""
    if device_list_type is None or device_assignment_type is None:
        return None
    try:
        watched, lowering = copy(lowered), copy(lowered._lowering)
        lowering.compile_args = {**lowering.compile_args, "backend": _Client(lowering.compile_args["backend"])}
        watched._lowering = lowering
    except (AttributeError, KeyError, TypeError):
        return None
    return watched


def _origin_of(compiled: Any) -> ExecutableOrigin | None:
    """Return the origin of what a `_Client` compiled, and give the executable its real client back."""
    try:
        unloaded = compiled._executable._unloaded_executable
        client, unloaded.backend = unloaded.backend, unloaded.backend.real
    except AttributeError:
        return None
    found = next((origin for origin in client.origins if origin.executable is unloaded.xla_executable), None)
    client.origins.clear()  # JAX keeps the client as long as the program
    return found
