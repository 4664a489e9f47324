"""Running the examples as a user does, in a process of their own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
CACHE = "Error reading persistent compilation cache entry"  # another worker is writing it


def run_example(name: str, *arguments: str, timeout: float = 300) -> str:
    """The standard output of an example; warnings are errors there too."""
    # The examples make their own devices, so the tests' setting of them stays out.
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": f"error,ignore:{CACHE}"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def load_example(name: str) -> SimpleNamespace:
    """What an example defines, without running it."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / name), run_name=name))
