"""What several test modules share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Activations are larger than what the engine's labels call tiny, so that every matrix product is real work to them.
ROWS, DIM = 16, 8


def batch_of(
    num_microbatches: int, rows: int = ROWS, dim: int = DIM, seed: int = 1, *, host: bool = False, labels: bool = False
) -> dict[str, Any]:
    """Inputs `x` and targets `y` in float32: (microbatches, rows, features).

    Args:
      host: NumPy's arrays in place of those of the first device.
      labels: integers `ids` below `dim`, and booleans `mask`, too: (microbatches, rows).
    """
    rng = np.random.default_rng(seed)
    shape = (num_microbatches, rows, dim)
    batch = {name: rng.normal(size=shape).astype(np.float32) for name in "xy"}
    if labels:
        batch |= {"ids": rng.integers(0, dim, shape[:2]).astype(np.int32), "mask": rng.random(shape[:2]) < 0.7}
    return batch if host else jax.tree.map(jnp.asarray, batch)


def slow(*values: Any) -> Any:
    """Values of `pytest.mark.parametrize` that repeat, in another combination, what the default tier tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(values: Iterable[Any], *default: Any) -> list[Any]:
    """All of `values` for `pytest.mark.parametrize`; only those of `default` are in the default tier."""
    return [value if value in default else slow(value) for value in values]


def python_blocks(page: Path) -> list[str]:
    """The blocks of Python on a page, a notebook's cells among them, in order."""
    return re.findall(r"```(?:python|\{code-cell\})\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def steps_in(directory: Path) -> list[int]:
    """The steps of the complete checkpoints in a directory of several."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def tree_allclose(actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    """Fail, naming each wrong leaf, unless both trees agree in structure, shapes, dtypes and values.

    ``rtol`` is relative to the largest magnitude of the expected leaf, since a sum in another order moves
    small entries by the rounding error of large ones. ``rtol=0, atol=0`` asks for bitwise equality (NaN equals NaN).

    >>> import numpy as np
    >>> tree_allclose({"w": np.ones(2)}, {"w": np.ones(2)})
    >>> tree_allclose({"w": np.ones(2)}, {"w": np.zeros(2)})
    Traceback (most recent call last):
    AssertionError: ['w']: 2 of 2 values differ, most at (0,): 1.0, expected 0.0 (difference 1, allowed 1e-08)
    >>> tree_allclose({"w": np.ones(2)}, {"v": np.ones(2)})
    Traceback (most recent call last):
    AssertionError: the trees differ in structure
    ['w']: not expected
    ['v']: missing
    """
    actual_leaves, actual_structure = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree_util.tree_flatten_with_path(expected)
    actual_by_path = {jax.tree_util.keystr(path): leaf for path, leaf in actual_leaves}
    expected_by_path = {jax.tree_util.keystr(path): leaf for path, leaf in expected_leaves}
    if actual_by_path.keys() != expected_by_path.keys() or actual_structure.num_leaves != expected_structure.num_leaves:
        extra = [f"{path}: not expected" for path in actual_by_path if path not in expected_by_path]
        missing = [f"{path}: missing" for path in expected_by_path if path not in actual_by_path]
        raise AssertionError("\n".join(["the trees differ in structure", *extra, *missing]))
    if actual_structure != expected_structure:
        raise AssertionError(
            f"the trees differ in structure\nactual:   {actual_structure}\nexpected: {expected_structure}"
        )
    faults = [
        f"{path}: {fault}"
        for path, leaf in actual_by_path.items()
        if (fault := _difference(leaf, expected_by_path[path], rtol, atol))
    ]
    if faults:
        raise AssertionError("\n".join(faults))


def _difference(actual: Any, expected: Any, rtol: float, atol: float) -> str | None:
    """What is wrong with one leaf, or None."""
    actual, expected = _to_numpy(actual), _to_numpy(expected)
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return None
    if not (np.issubdtype(actual.dtype, np.number) or jax.dtypes.issubdtype(actual.dtype, np.inexact)):
        wrong = actual != expected
        difference, allowed = wrong.astype(np.float64), 0.0
    else:
        wide = np.complex128 if np.iscomplexobj(actual) else np.float64
        a, e = actual.astype(wide), expected.astype(wide)
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        finite = np.abs(e[np.isfinite(e)])
        allowed = atol + rtol * (float(finite.max()) if finite.size else 0.0)
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(a - e))
        difference = np.where(np.isnan(difference), np.inf, difference)
        wrong = difference > allowed
    if not wrong.any():
        return None
    where = np.unravel_index(int(np.argmax(difference)), difference.shape)
    place = f", most at {tuple(int(i) for i in where)}" if difference.ndim else ""
    return (
        f"{int(wrong.sum())} of {wrong.size} values differ{place}: {actual[where]}, expected {expected[where]} "
        f"(difference {difference[where]:.3g}, allowed {allowed:.3g})"
    )


def _to_numpy(leaf: Any) -> np.ndarray:
    """The leaf as a NumPy array; PRNG keys as their data."""
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(jnp.asarray(leaf))
    return np.asarray(leaf)


@contextmanager
def cache_on_disk(directory: Path, *, used: bool = True) -> Iterator[None]:
    """JAX's cache of compilations in a directory, for quick ones too; no cache if it is not `used`."""
    settings = {
        "jax_enable_compilation_cache": used,
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
