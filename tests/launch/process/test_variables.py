"""Environment variables that a program sets before it imports JAX do under the launcher what they do without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpp_flax.launch.settings import compilation_cache
from tests.launch.running import QUICK, REAL, launched
from tests.running import run_python

pytestmark = pytest.mark.processes

SOURCE = """
import os
import numpy  # imports no JAX
os.environ["JAX_ENABLE_X64"] = "on"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "3"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "2.5"
os.environ["XLA_FLAGS"] = "--xla_dump_to=" + os.path.abspath(f"dump{os.getpid()}")
import flax.nnx
os.environ["JAX_ENABLE_X64"] = "off"  # too late
import jax
value = jax.jit(lambda x: x + 1)(jax.numpy.arange(2.0))
print("got", value.dtype, os.path.isdir(f"dump{os.getpid()}"), __import__.__module__, *(
    jax.config.values[f"jax_{name}"]
    for name in ("default_matmul_precision", "traceback_in_locations_limit", "persistent_cache_min_compile_time_secs")
))
"""


@pytest.mark.parametrize(
    ("options", "launcher"), [(["-n", "2"], QUICK), (["-n", "1"], QUICK), (["-n", "2", "--no-fork"], REAL)],
    ids=["forks", "one", "no forks"],
)  # fmt: skip
def test_variables_of_a_program_count_until_it_imports_jax(
    tmp_path: Path, options: list[str], launcher: tuple[str, ...]
):
    with launched(tmp_path, SOURCE, *options, launcher=launcher) as run:
        plain = run_python(str(tmp_path / "script.py"), cwd=tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=None).stdout
        assert run.finish() == 0, run.stderr
    assert plain == "got float64 True builtins highest 3 2.5\n"
    assert sorted(run.stdout.splitlines()) == [f"[{index}] {plain.rstrip()}" for index in range(int(options[1]))]
    assert "jaxpp_flax: " not in run.stderr


def test_what_cannot_be_applied_is_said(tmp_path: Path):
    source = """
import os
os.environ["JAX_MY_OWN"] = "1"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
print("devices", len(jax.local_devices()))
"""
    with launched(tmp_path, source, "-n", "1") as run:
        assert run.finish() == 0, run.stderr
    assert run.stdout == "[0] devices 1\n"
    said = [line for line in run.stderr.splitlines() if line]
    launcher_s = "has no effect: the launcher gives each process its devices (--devices-per-process)."
    assert said == [
        f"[0] jaxpp_flax: --xla_force_host_platform_device_count in the program's XLA_FLAGS {launcher_s}",
        "[0] jaxpp_flax: the program sets JAX_MY_OWN=1 before it imports JAX, which has no such option.",
        f"[0] jaxpp_flax: the program's JAX_NUM_CPU_DEVICES=8 {launcher_s}",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("os.environ['JAX_ENABLE_X64'] = '2'", "JAX_ENABLE_X64=2, which the program sets .*: '2' is no truth value"),
        ("os.environ['JAX_DEFAULT_MATMUL_PRECISION'] = 'best'", "JAX_DEFAULT_MATMUL_PRECISION=best, which the program"),
        ("del os.environ['JAX_PLATFORMS']", "takes JAX_PLATFORMS out of its environment .*Unset it"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_where_the_program_imports_jax(tmp_path: Path, line: str, says: str):
    with launched(tmp_path, f"import os\n{line}\nimport jax\n", "-n", "1") as run:
        assert run.finish() == 1
    assert re.search(rf"LaunchError: .*{says}", run.stderr), run.stderr


def test_the_launcher_s_own_variable_is_not_the_program_s(tmp_path: Path):
    source = """
import os
from jaxpp_flax.launch import initialize
print("own", "JAXPP_FLAX_LAUNCH" in os.environ, initialize().process_count)
"""
    with launched(tmp_path, source, "-n", "1") as run:
        assert run.finish() == 0, run.stderr
        assert run.stdout == "[0] own False 1\n"


def test_a_process_without_a_home_keeps_no_compilations(monkeypatch: pytest.MonkeyPatch):
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert compilation_cache({}) is None
    assert compilation_cache({"JAX_COMPILATION_CACHE_DIR": "/scratch"}) is None
