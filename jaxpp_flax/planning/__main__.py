"""The command line: ``python -m jaxpp_flax.planning plan``."""

import sys

from jaxpp_flax.planning.cli import main

sys.exit(main())
