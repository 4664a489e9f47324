"""The compiler and runtime: trace, passes, program, run. It knows nothing of Flax, Optax or Orbax."""

from pathlib import Path

from jax.extend import source_info_util

# Messages name the user's line, not a line of this package.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))
