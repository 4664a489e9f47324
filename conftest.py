"""Settings of every test and doctest, made before anything imports JAX: virtual devices, and quick compilation.

Most of a test is XLA compiling. By default XLA optimizes little, and one compilation cache serves the whole run: the
workers of pytest-xdist and the processes that tests start inherit these environment variables. A variable that is set
already is kept, so `JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` compiles as users do.
"""

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from importlib.metadata import version
from typing import Any

import pytest

NUM_DEVICES = 8


def add_xla_flag(name: str, value: object) -> None:
    """Set a flag of XLA unless the environment does."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


os.environ.setdefault("JAX_PLATFORMS", "cpu")
add_xla_flag("xla_force_host_platform_device_count", NUM_DEVICES)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if version("jaxlib").startswith("0.10."):
    # A third of the time to compile. JAX 0.12 does not know this flag, and ends with an error for an unknown flag.
    add_xla_flag("xla_cpu_use_fusion_emitters", "false")
    # Two thirds of the rest: each program in one piece, not in parts beside each other. Workers fill the cores already.
    add_xla_flag("xla_cpu_parallel_codegen_split_count", 1)

_RUN_CACHE = None  # removed after the run; a directory that the environment names is kept
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _RUN_CACHE = tempfile.mkdtemp(prefix="jaxpp_flax_tests_")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(scope="session")
def default_axes() -> Any:
    """The trainer's own rule for the devices of a rank."""
    return _RULE[0]


@pytest.fixture
def all_devices(default_axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `mesh=`, a trainer takes all devices, as it does for users."""
    monkeypatch.setattr("jaxpp_flax.trainers.stages.scheduling.default_axes", default_axes)


_RULE: list[Any] = []


def pytest_configure() -> None:
    """Without `mesh=`, a trainer of a test takes one device for each rank, unless the test asks for `all_devices`.

    A test that says nothing of devices is then as small as its stages, however many devices there are.
    """
    from jaxpp_flax.trainers.stages import scheduling

    _RULE.append(scheduling.default_axes)
    scheduling.default_axes = lambda num_ranks: {}


def pytest_unconfigure() -> None:
    """Remove the compilation cache of this run."""
    if _RUN_CACHE is not None:
        shutil.rmtree(_RUN_CACHE, ignore_errors=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give every test the mark `all`, which selects all tiers."""
    item.add_marker("all")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """All cores for the tiers without deadlines; one process for tests with deadlines, and for a single file."""
    expression = config.getoption("markexpr")
    single = len(config.args) == 1 and ".py" in config.args[0]
    if ("not processes" in expression or expression == "slow") and not single:
        return None  # as many as there are cores
    config.option.dist = "no"
    return 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out soak and compilers unless `-m` names them or all, and slow process tests if it names one of the two."""
    named = set(re.findall(r"\w+", config.getoption("markexpr")))
    if "all" in named:
        return

    def is_left_out(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        return bool({"soak", "compilers"} & marks - named) or (
            {"slow", "processes"} <= marks and len({"slow", "processes"} & named) == 1
        )

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="module", autouse=True)
def _without_older_objects() -> None:
    """Leave what stays until the end out of each later collection of garbage: all tests, and what JAX keeps of earlier
    files. Collections took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compile as users do in tests marked `full_compilation`: with all optimizations, and without the cache on disk."""
    if item.get_closest_marker("full_compilation") is None:
        return (yield)
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def apply(quick: bool, cache: bool) -> None:
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.config.update("jax_enable_compilation_cache", cache)
        compilation_cache.reset_cache()  # JAX remembers whether it uses the cache

    before = jax.config.read("jax_disable_most_optimizations"), jax.config.jax_enable_compilation_cache
    apply(quick=False, cache=False)
    try:
        return (yield)
    finally:
        apply(*before)
