"""The command line: ``python -m jaxpp_flax.schedules show|compare``."""

import sys

from jaxpp_flax.schedules.tools.cli import main

sys.exit(main())
