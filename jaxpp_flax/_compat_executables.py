"""One compilation for several sets of devices; the second file that touches private names of JAX.

JAX compiles a program once for each set of devices. An executable that XLA has compiled can be serialized, and loaded
with compile options that name other devices: the same bits in a twentieth of the time.

An executable that was itself loaded must not be serialized again: on CPU the copy computes wrong numbers without an
error. Whether XLA compiled an executable, or JAX loaded it from its cache on disk, is therefore observed; a copy of a
loaded one is loaded from the same file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpp_flax._compat import compilation_cache, device_list_type, xla_options

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
        client, devices = unloaded.backend, tuple(mesh.devices.flat)
        there = device_list_type(devices)
        with self._lock:
            options = self._options_for(devices)
            source = self._serialized if self.by_xla else self._key(client)
        if self.by_xla:
            return client.deserialize_executable(source, there, options)
        return compilation_cache.get_executable_and_time(source, options, client, there)[0]

    def _key(self, client: Any) -> str:
        """The name of the executable in JAX's cache on disk."""
        module, here = self.lowered._lowering.stablehlo(), np.array(self.devices, dtype=object)
        return compilation_cache.get_cache_key(module, here, self._options_for(self.devices), client)

    @cached_property
    def _serialized(self) -> bytes:
        """The executable as bytes, of which every copy is made."""
        unloaded = self.compiled._executable._unloaded_executable
        return unloaded.backend.serialize_executable(unloaded.xla_executable)

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


def compile_original(lowered: Any, devices: Sequence[Any], options: Mapping[str, Any] | None) -> Original:
    """Compile a `jax.stages.Lowered` for devices; `options` are XLA's, as in `jax.jit(compiler_options=)`."""
    _observing()
    before = Counter(_counts())
    compiled = lowered.compile(compiler_options=options, device_assignment=tuple(devices))
    seen = _counts() - before
    by_xla = seen["backend_compile_duration"] == 1 and not seen["cache_hits"]
    return Original(compiled, lowered, tuple(devices), dict(options or {}), by_xla)
