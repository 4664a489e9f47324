"""Stand-ins under the names of other packages, for programs whose imports cannot be changed.

After `install()`, `import jaxpp` imports `jaxpp_flax.compat.jaxpp`. Without this call, nothing changes.

Example:
  >>> import jaxpp_flax.compat
  >>> jaxpp_flax.compat.install()
  >>> import jaxpp.api
  >>> from jaxpp.schedules import Std1F1B
  >>> jaxpp.api.Std1F1B is Std1F1B
  True
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

__all__ = ["install"]

_STAND_IN = f"{__name__}.jaxpp"


def install() -> None:
    """Make `import jaxpp` import the stand-in, with its submodules, in this process. A second call changes nothing.

    Raises:
      RuntimeError: if another `jaxpp` is imported already: names that a program took from it would not match the
        stand-in's.
    """
    package = import_module(_STAND_IN)
    present = sys.modules.get("jaxpp")
    if present is not None and present is not package:
        raise RuntimeError(
            f"jaxpp is imported already, from {getattr(present, '__file__', 'an unknown place')}. Call "
            "jaxpp_flax.compat.install() before the first import of jaxpp."
        )
    sys.modules["jaxpp"] = package
    sys.modules["jaxpp.api"] = package.api
    sys.modules["jaxpp.schedules"] = package.schedules
    for module in pkgutil.iter_modules(package.__path__):
        sys.modules[f"jaxpp.{module.name}"] = import_module(f"{_STAND_IN}.{module.name}")
    sys.modules["jaxpp.experimental.mpmd"] = sys.modules["jaxpp.experimental"].mpmd
