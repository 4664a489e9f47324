"""A run in one process: its shared store in memory, and threads that play its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class MemoryStore:
    """A key-value store that the threads of a test share, each of which plays a process."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.hangs = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self.wait_if_hanging()
        with self.changed:
            self.entries[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: key in self.entries, timeout_s)
            return self.entries.get(key)

    def list(self, folder: str) -> dict[str, bytes]:
        self.wait_if_hanging()
        with self.changed:
            return {k.removeprefix(folder + "/"): v for k, v in self.entries.items() if k.startswith(folder + "/")}

    def without_patience(self) -> MemoryStore:
        return self

    def claim(self, key: str, value: bytes) -> bytes:
        with self.changed:
            return self.entries.setdefault(key, value)

    def add(self, key: str) -> int:
        with self.changed:
            self.entries[key] = str(int(self.entries.get(key, b"0")) + 1).encode()
            return int(self.entries[key])

    def delete(self, key: str) -> None:
        with self.changed:
            for name in [name for name in self.entries if name == key or name.startswith(key + "/")]:
                del self.entries[name]

    def wait_if_hanging(self) -> None:
        while self.hangs.is_set():
            time.sleep(0.01)


def in_parallel(functions: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]
