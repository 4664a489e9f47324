"""The package `jaxpp` over `jaxpp_flax.api`: `jaxpp_flax.compat.install()` puts it in that package's place."""

from jaxpp_flax import __version__ as __version__
from jaxpp_flax import api as api
from jaxpp_flax.api import schedules as schedules
