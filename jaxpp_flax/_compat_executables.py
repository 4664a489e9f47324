"""One compilation for several sets of devices; the second file that touches private names of JAX.

JAX compiles a program once for each set of devices. An executable that XLA has compiled can be serialized, and loaded
with compile options that name other devices: the same bits in a twentieth of the time.

An executable that was itself loaded must not be serialized again: on CPU the copy computes wrong numbers without an
error. Whether XLA compiled an executable, or JAX loaded it from its cache on disk, is therefore observed; a copy of a
loaded one is loaded from the same file.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpp_flax._compat import compilation_cache, compiler, device_list_type, xla_options

_events = threading.local()  # a counter of the compilations and the cache hits of each thread


def _observe(event: str, *_: Any, **__: Any) -> None:
    if event in ("/jax/compilation_cache/cache_hits", "/jax/core/compile/backend_compile_duration"):
        _counts()[event.rpartition("/")[2]] += 1


def _counts() -> Counter[str]:
    if not hasattr(_events, "counts"):
        _events.counts = Counter()
    return _events.counts


@cache
def _observing() -> None:
    jax.monitoring.register_event_listener(_observe)
    jax.monitoring.register_event_duration_secs_listener(_observe)


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


@cache
def cache_hits_are_told() -> bool:
    """Return whether a listener of `jax.monitoring` learns that an executable comes from JAX's cache on disk."""
    try:
        return compiler is not None and "/jax/compilation_cache/cache_hits" in inspect.getsource(compiler)
    except OSError:  # JAX is installed without its sources
        return False


def uses_cache_on_disk() -> bool:
    """Return whether JAX's cache of compilations on disk is in use."""
    config: Any = jax.config  # these settings have no types
    return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


@dataclass(frozen=True)
class Original:
    """An executable that can be copied onto other devices.

    Attributes:
      compiled: a `jax.stages.Compiled` for `devices`.
      lowered: the `jax.stages.Lowered` from which it came, for no devices in particular.
      by_xla: whether XLA compiled it, here and now.
    """

    compiled: Any
    lowered: Any
    devices: tuple[Any, ...]
    options: Mapping[str, Any]
    by_xla: bool
    _lock: Any = field(default_factory=threading.Lock, repr=False)  # no module of MLIR stands two threads at once

    def copy_for(self, mesh: Mesh) -> Any:
        """Return a `jax.stages.Compiled` for the devices of `mesh`, a mesh of the same shape and axes.

        Returns:
          None if the executable is bound to its devices or to Python objects (callbacks, for one), or if this JAX or
          this platform cannot copy it: then compile once more. The executable itself for its own devices.
        """
        if self.devices == tuple(mesh.devices.flat):
            return self.compiled
        try:
            return self._copy_for(mesh)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None

    def _copy_for(self, mesh: Mesh) -> Any:
        unloaded = self.compiled._executable._unloaded_executable
        shardings = [*unloaded.input_shardings, *unloaded.output_shardings]
        bound = (
            *(unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects or unloaded.keepalive),
            *(device for device in self.devices if device.process_index != jax.process_index()),
            *(device for device in mesh.devices.flat if device.device_kind != self.devices[0].device_kind),
            *(sharding for sharding in shardings if not isinstance(sharding, NamedSharding)),
            *self.compiled._params.const_args,
        )
        if bound or unloaded.mut or unloaded.pgle_profiler:
            return None
        executable = self._loaded_for(unloaded, mesh)
        if executable is None:
            return None
        moved = [NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in shardings]
        loaded = replace(
            unloaded,
            xla_executable=executable,
            device_list=device_list_type(tuple(mesh.devices.flat)),
            input_shardings=moved[: len(unloaded.input_shardings)],
            output_shardings=moved[len(unloaded.input_shardings) :],
        ).load()
        ours = self.compiled
        return jax.stages.Compiled(loaded, [], ours.args_info, ours.out_tree, no_kwargs=ours._no_kwargs)

    def _loaded_for(self, unloaded: Any, mesh: Mesh) -> Any:
        devices = tuple(mesh.devices.flat)
        with self._lock:
            options, serialized = self._options_for(devices), self._serialized
        if serialized is None:
            return None
        return unloaded.backend.deserialize_executable(serialized, device_list_type(devices), options)

    @cached_property
    def _serialized(self) -> bytes | None:
        """The executable as bytes, of which every copy is made; None if it was loaded, and its file is gone."""
        unloaded = self.compiled._executable._unloaded_executable
        client = unloaded.backend
        if self.by_xla:
            return client.serialize_executable(unloaded.xla_executable)
        options, here = self._options_for(self.devices), np.array(self.devices, dtype=object)
        key = compilation_cache.get_cache_key(self.lowered._lowering.stablehlo(), here, options, client)
        return compilation_cache.get_executable_and_time(key, options, _Undecoded(client), here)[0]

    def _options_for(self, devices: Sequence[Any]) -> Any:
        lowering = self.lowered._lowering
        arguments = lowering.compile_args
        propagate = xla_options.get_prop_to_input_output(
            arguments["in_shardings"], arguments["out_shardings"], len(arguments["ordered_effects"])
        )
        return xla_options.create_compile_options(
            lowering.stablehlo(),
            arguments["tuple_args"],
            *propagate,
            arguments["backend"],
            np.array(devices, dtype=object),
            dict(self.options),
        )


class _Undecoded:
    """A client of XLA for JAX's cache on disk: the cache hands on the bytes of an executable instead of loading it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, serialized: bytes, *_: Any) -> bytes:
        return serialized


def compile_original(lowered: Any, devices: Sequence[Any], options: Mapping[str, Any] | None) -> Original:
    """Compile a `jax.stages.Lowered` for devices; `options` are XLA's, as in `jax.jit(compiler_options=)`."""
    _observing()
    before = Counter(_counts())
    compiled = lowered.compile(compiler_options=options, device_assignment=tuple(devices))
    seen = _counts() - before
    loaded = uses_cache_on_disk() and (seen["cache_hits"] or not cache_hits_are_told())
    by_xla = seen["backend_compile_duration"] == 1 and not loaded
    return Original(compiled, lowered, tuple(devices), dict(options or {}), by_xla)
