"""The package `jaxpp` with the names of `jaxpp_flax.api`; `jaxpp_flax.compat.install()` makes it importable."""

from jaxpp_flax import __version__ as __version__
from jaxpp_flax import api as api
from jaxpp_flax.api import schedules as schedules
