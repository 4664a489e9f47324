"""Running the examples as a user does, in a process of their own."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

from tests.running import ROOT, run_python

CACHE = "Error reading persistent compilation cache entry"  # another worker is writing it


def run_example(name: str, *arguments: str, timeout: float = 300) -> str:
    """The standard output of an example; warnings are errors there too."""
    # The examples make their own devices, so the tests' setting of them stays out.
    changed = {"XLA_FLAGS": None, "PYTHONWARNINGS": f"error,ignore:{CACHE}"}
    return run_python(str(ROOT / "examples" / name), *arguments, timeout=timeout, **changed).stdout


def load_example(name: str) -> SimpleNamespace:
    """What an example defines, without running it."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / name), run_name=name))
