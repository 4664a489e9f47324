"""Run by `test_memory.py` as several processes: what each holds, on the host, in every call of a trainer.

Usage: run_memory.py FOLDER. Prints JSON: by call, the bytes beyond what the process may hold; and the leaf's bytes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes.running import join_run, tell

join_run()


from tests.trainers.lives import LIVES, live  # noqa: E402

SMALL, WIDTH = 64, 1448  # leaves of 8 MiB
LEAF = WIDTH * WIDTH * 4
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
# Calls on two ranks would leave two of four processes without a part. The others are left out because a part of a
# checkpoint is less than a whole one, and because weights before a first step are placed as in "moved".
LEFT_OUT = ("restored what is there", "saved in part", "evaluated")
OWN = {name: life for name, life in LIVES.items() if "2" not in name and name not in LEFT_OUT}


def memory(field: str) -> int:
    """VmRSS: the process's memory now. VmHWM: the most since the last `forget`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    faulthandler.dump_traceback_later(300, exit=True)
    # Freed leaves go back to the system at once: the C library would keep them, after it has freed a first large one.
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, 1 << 20)
    folder = Path(sys.argv[1])
    over: dict[str, float] = {}

    def watched(name: str, call: Callable[[], Any], share: int) -> None:
        gc.collect()
        library.malloc_trim(0)  # what compilations have freed
        forget()
        call()
        over[name] = (memory("VmHWM") - before - share) / LEAF

    # Imports, threads, and the code of XLA.
    live(folder / "small", SMALL, lambda name, call, share: call(), {name: OWN[name] for name in ("new", "speaking")})
    gc.collect()
    gc.freeze()  # what JAX keeps of it need not be looked through again before each call
    before = memory("VmRSS")
    live(folder / "large", WIDTH, watched, OWN)
    tell(over)


main()
