"""The launcher, in forks of an interpreter that has imported all: `start_program(["-m", "tests.launch.quick", ...])`.

It is `python -m jaxpp_flax.launch`, except that its warm interpreter is a fork too. To import JAX, Flax and Orbax for
each run would take several times longer than a small run.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from jaxpp_flax.launch import cli
from jaxpp_flax.launch.host import warm


def main() -> int:
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:  # before this process has threads
        ours.close()
        os.setpgid(0, 0)
        warm.main(theirs)
        return 0
    theirs.close()

    begin = warm.WarmInterpreter.__init__

    def use(self: Any, signals: Sequence[int] = ()) -> None:
        self._connection, self._popen, self._signals = ours, warm.Forked(pid), signals
        warm.WarmInterpreter.__init__ = begin  # another one imports, as in earnest

    warm.WarmInterpreter.__init__ = use
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
