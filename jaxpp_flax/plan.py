"""The command that predicts training times on given hardware: ``python -m jaxpp_flax.plan``."""

import sys

from jaxpp_flax.planning.quoting.cli import main

if __name__ == "__main__":
    sys.exit(main())
