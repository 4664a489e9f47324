"""The command line: ``python -m jaxpp_flax.launch -n 4 script.py args...``."""

import signal
import sys

# While JAX is imported, a function that it calls at each collection of garbage may swallow Ctrl-C: the run would start.
before = signal.getsignal(signal.SIGINT)
if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from jaxpp_flax.launch.cli import main  # noqa: E402

signal.signal(signal.SIGINT, before)
sys.exit(main())
