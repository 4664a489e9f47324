"""JAX's cache of compilations, written by every process of a run: whole entries, in the user's directory or ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax._compat_processes import cache
from tests.helpers import cache_on_disk
from tests.launch.running import REAL, launched

COUNT = """
import os, jax
found = {"cache_hits": 0, "compile_requests_use_cache": 0}
def count(name, **_):
    found[name.rpartition("/")[2]] = found.get(name.rpartition("/")[2], 0) + 1
jax.monitoring.register_event_listener(count)
index = jax.process_index()
jax.jit(lambda x: x * index + 41)(jax.numpy.arange(3.0)).block_until_ready()
print(found["cache_hits"], "of", found["compile_requests_use_cache"], "in", jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.processes
def test_every_process_finds_what_it_compiled_in_the_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for life in range(2):
        with launched(tmp_path, COUNT, "-n", "2", launcher=REAL) as run:
            assert run.finish() == 0, run.stderr
            for index in range(2):
                [line] = [line for line in run.stdout.splitlines() if line.startswith(f"[{index}]")]
                words = line.split()
                assert int(words[1]) == (int(words[3]) if life else 0)
                assert int(words[3]) > 0
                assert words[5].startswith(f"{tmp_path}/jaxpp_flax/compiled/")


def test_an_entry_is_written_by_any_process_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = pytest.importorskip("jax._src.compiler")
    jax.devices()  # else the backend would be that of process 1, for all tests that follow
    monkeypatch.setattr(compiler, "_cache_write", cache._write)
    monkeypatch.setattr(cache._files, "put", cache._put)
    monkeypatch.setattr("jax._src.distributed.global_state.process_id", 1)
    with cache_on_disk(tmp_path):
        jax.jit(lambda x: x + 40)(jnp.arange(3.0)).block_until_ready()
        assert not list(tmp_path.iterdir())  # JAX itself
        assert cache.write_in_every_process()
        jax.jit(lambda x: x + 41)(jnp.arange(3.0)).block_until_ready()
        assert list(tmp_path.iterdir())
        assert not list(tmp_path.glob("*.unfinished"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = SimpleNamespace(eviction_enabled=False, path=tmp_path)

    def fill(path: Path, value: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(OSError, match="No space left"):
            cache._put_whole(files, "key", b"value")
    assert not list(tmp_path.iterdir())
    cache._put_whole(files, "key", b"value")
    cache._put_whole(files, "key", b"another")  # an entry stays
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"value"]


@pytest.mark.parametrize("chosen", [False, True])
def test_our_own_directory_keeps_what_was_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool):
    monkeypatch.setattr(cache, "_MOST_BYTES", 250)
    (tmp_path / "folder").mkdir()  # not ours
    for age, name in enumerate(["new", "read", "old", "older", "killed.unfinished"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - 10 * age, 1000 - 10 * age))
    os.utime(tmp_path / "read", (2000, 0))
    with cache_on_disk(tmp_path):
        if not chosen:
            jax.config.update("jax_compilation_cache_dir", None)
        cache.use_directory(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == (
        {"new", "read", "old", "older", "killed.unfinished"} if chosen else {"new", "read"}
    )


def test_a_limit_of_the_user_is_left_to_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_MOST_BYTES", 0)
    (tmp_path / "entry").write_bytes(b"value")
    with cache_on_disk(tmp_path):
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_compilation_cache_max_size", 1 << 40)
        try:
            cache.use_directory(tmp_path)
        finally:
            jax.config.update("jax_compilation_cache_max_size", -1)
    assert (tmp_path / "entry").exists()


def test_a_directory_that_cannot_be_made_or_read_is_not_used(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"no folder")
    with cache_on_disk(tmp_path):
        jax.config.update("jax_compilation_cache_dir", None)
        for directory in (tmp_path / "file", tmp_path / "file" / "compiled"):
            with pytest.raises(OSError, match="file"):
                cache.use_directory(directory)
            assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]


def test_files_that_another_process_deletes_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache._prune(tmp_path / "missing", 0)
    (tmp_path / "entry").write_bytes(b"value")

    def gone(path: str) -> None:
        os.remove(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", gone)
    cache._prune(tmp_path, 0)
    assert not list(tmp_path.iterdir())
