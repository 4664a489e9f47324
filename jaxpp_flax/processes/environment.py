"""What around a process changes its numbers without a trace in its program: versions, settings and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

import jax

__all__ = ["describe_environment", "seconds_of"]

# Settings that XLA compiles by, or that are applied when a program is lowered: a jaxpr does not show them.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_allow_f16_reductions",
    "jax_disable_jit",
    "jax_cpu_collectives_implementation",
)
_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Flags of XLA that each process may have as it likes: how many devices it has, and what it writes where.
_OWN_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_gpu_dump")


def describe_environment() -> list[str]:
    """Versions, settings and flags in lines that all processes of a run are to have alike.

    Settings are those at the moment of the call: scripts change them after the start.

    Example:
      >>> [line for line in describe_environment() if "enable_x64" in line]
      ['the setting jax_enable_x64 is False']
    """
    # A setting may come or go with JAX's version, which the first lines compare.
    lines = [f"the version of {name} is {version(name)}" for name in ("jax", "jaxlib")]
    lines += [f"the setting {name} is {getattr(jax.config, name)}" for name in _SETTINGS if hasattr(jax.config, name)]
    lines += [f"the environment variable {name} is {os.environ.get(name)!r}" for name in _VARIABLES]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OWN_FLAGS))
    return [*lines, f"the environment variable XLA_FLAGS has {' '.join(flags) or 'nothing'}"]


def seconds_of(environment: Mapping[str, str], name: str, default: float) -> float:
    """A time that an environment variable says, or the default if it is not set.

    Raises:
      ValueError: if it is no positive number.

    Example:
      >>> seconds_of({"JAXPP_FLAX_START_TIMEOUT": "5"}, "JAXPP_FLAX_START_TIMEOUT", 1800.0)
      5.0
    """
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{name}={text!r}: it must be a number of seconds above 0.")
    return value
