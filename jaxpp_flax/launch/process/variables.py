"""JAX's environment variables that a program sets before it imports JAX, which its launcher has imported already.

JAX reads them when it is imported. XLA and the libraries of devices read theirs at the first use of a device.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxpp_flax._compat_texts.options import set_option
from jaxpp_flax.launch.settings import LaunchError
from jaxpp_flax.processes.waits import print_notice

__all__ = ["applied_at_first_import"]

# Packages that import JAX, and that a launcher imports.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax", "jaxpp_flax")
_DEVICES, _XLA_DEVICES = "JAX_NUM_CPU_DEVICES", "--xla_force_host_platform_device_count"


@contextlib.contextmanager
def applied_at_first_import() -> Generator[None]:
    """Inside, the program's first import of JAX, or of a library with it, applies the variables that it has changed.

    A change after it has no effect, as in a program without a launcher. No module that is there already is told of its
    import; so this stands in for Python's own function until then.
    """
    before, real, done = dict(os.environ), builtins.__import__, False

    def importing(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        nonlocal done
        importer = (globals or {}).get("__name__") or ""
        if not (done or level) and _package(name) in _PACKAGES and _package(importer) not in _PACKAGES:
            done = True
            restore()
            _apply(before, os.environ)
        return real(name, globals, locals, fromlist, level)

    def restore() -> None:
        if builtins.__import__ is importing:  # else the program has put one of its own around it
            builtins.__import__ = real

    builtins.__import__ = importing
    try:
        yield
    finally:
        restore()


def _package(name: str) -> str:
    return name.partition(".")[0]


def _apply(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Set JAX's options by the variables that have changed.

    Raises:
      LaunchError: if an option does not take its variable's text, or a variable has gone.
    """
    of_launcher = "has no effect: the launcher gives each process its devices (--devices-per-process)"
    if _DEVICES in before and _XLA_DEVICES in now.get("XLA_FLAGS", ""):
        print_notice(f"{_XLA_DEVICES} in the program's XLA_FLAGS {of_launcher}.")
    for name in sorted({*before, *now}):
        text = now.get(name)
        if not name.startswith("JAX_") or text == before.get(name):
            continue
        if name == _DEVICES and name in before:
            print_notice(f"the program's {name}={text} {of_launcher}.")
        elif text is None:
            raise LaunchError(
                f"the program takes {name} out of its environment before it imports JAX, but its launcher has imported "
                f"JAX with {name}={before[name]}. Unset it where the launcher starts."
            )
        elif not _is_set(name, text):
            print_notice(f"the program sets {name}={text} before it imports JAX, which has no such option.")


def _is_set(name: str, text: str) -> bool:
    try:
        return set_option(name, text)
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{name}={text}, which the program sets before it imports JAX: {error}") from error
