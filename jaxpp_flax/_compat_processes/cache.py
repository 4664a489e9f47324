"""JAX's cache of compilations on disk, written by every process of a run.

By itself JAX writes it in process 0 alone. Each process of a pipeline compiles stages of its own, so all others would
compile everything again at each start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import jax

from jaxpp_flax._compat import private

__all__ = ["use_directory", "write_in_every_process"]

# JAX's own function that writes an entry. It asks whether this is process 0, and no setting changes the answer.
_write = private("jax._src.compiler", "_cache_write")
# The cache of a directory: it writes an entry in place, and no setting makes it rename one.
_files = private("jax._src.lru_cache", "LRUCache")
# The end of the names of its entries, by which JAX finds them.
_suffix = private("jax._src.lru_cache", "_CACHE_SUFFIX")
# Of a directory that this package has chosen: some hundred starts of large models.
_MOST_BYTES = 10 << 30


def write_in_every_process() -> bool:
    """Let this process write what it compiles, whichever its index, so that an entry appears whole or not at all.

    JAX writes an entry in place. A process that is killed meanwhile would leave a part of it, which no other process
    could read or replace, and two processes may write one entry at once. A bucket's objects always appear whole.

    Returns:
      Whether it took effect. If not, process 0 alone writes.
    """
    known = isinstance(_write, FunctionType) and "distributed" in _write.__code__.co_names
    if not known or None in (_files, _suffix):
        return False
    # The same code, for which every process is process 0.
    first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    everywhere = FunctionType(_write.__code__, {**_write.__globals__, "distributed": first})
    private("jax._src", "compiler")._cache_write = everywhere
    _files.put = _put_whole
    return True


_put = getattr(_files, "put", None)


def _put_whole(cache: Any, key: str, value: bytes) -> None:
    """Write an entry under another name, and rename it; in a bucket, or in a cache of limited size, as JAX does."""
    if cache.eviction_enabled or "://" in str(cache.path) or not key:
        return _put(cache, key, value)  # type: ignore[misc]
    entry = Path(str(cache.path), f"{key}{_suffix}")
    unfinished = entry.with_name(f"{secrets.token_hex(8)}.unfinished")
    if not entry.exists():
        try:
            unfinished.write_bytes(value)
            os.replace(unfinished, entry)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
    return None


def use_directory(directory: Path) -> None:
    """Let JAX keep what this process compiles in a directory, unless the user has chosen one, or none.

    Also what compiles within a second is kept, as far as the user has not chosen: a start consists of many of these.
    A directory that this package has chosen keeps 10 GiB: at a start, what was read longest ago is deleted.

    Raises:
      OSError: if the directory cannot be made or read; then nothing is kept.
    """
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return
    directory.mkdir(parents=True, exist_ok=True)
    if jax.config.jax_compilation_cache_max_size == -1:  # pyright: ignore[reportAttributeAccessIssue]
        _prune(directory, _MOST_BYTES)
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _prune(directory: Path, most: int) -> None:
    """Delete the files that were read longest ago, until the others have no more than so many bytes.

    JAX's own `jax_compilation_cache_max_size` needs `filelock`, which JAX does not install, and without it keeps
    nothing; all processes wait for one lock at each read; and entries without a time of reading, from before it was
    set or from a process that was killed, let JAX 0.10 write nothing any more.
    """
    found: list[tuple[float, int, str]] = []
    # Several processes may do so at once, and a directory may not exist yet.
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as files:
        for file in filter(os.DirEntry.is_file, files):
            with contextlib.suppress(FileNotFoundError):
                about = file.stat()
                found.append((max(about.st_atime, about.st_mtime), about.st_size, file.path))
    excess = sum(size for _, size, _ in found) - most
    for _, size, path in sorted(found):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        excess -= size
