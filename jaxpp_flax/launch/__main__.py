"""The command line: ``python -m jaxpp_flax.launch -n 4 script.py args...``."""

import sys

from jaxpp_flax.launch.cli import main

sys.exit(main())
