"""The command line: ``python -m jaxpp_flax.schedules show|compare|search|check``."""

import sys

from .cli import main

sys.exit(main())
