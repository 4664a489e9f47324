"""Every public name of `jaxpp.api`, in each of its versions, with the parameters that its callers may use."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import jaxpp_flax.api as jaxpp
from jaxpp_flax.api.missing import REMEDIES

# Parameters as JaxPP has them: "/" and "*" as in Python, "=" where there is a default. `self` is left out.
SIGNATURES = {
    "MpmdMesh": "jax_mesh, mpmd_axis_name",
    "MpmdMesh.lowering_mesh": "",
    "MpmdMesh.mpmd_submesh": "mpmd_indices",
    "MpmdMesh.mpmd_indices_for_mesh": "mesh",
    "MpmdArray": "partially_addressable_arrays, mpmd_sharding, shape=, dtype=",
    "MpmdArray.delete": "",
    "MpmdArray.is_deleted": "",
    "MpmdArray.block_until_ready": "",
    "MpmdSharding": "mpmd_mesh, mesh_ids, spec, memory_kind=",
    "mark_stage_end": "anchor, name=",
    "pipeline_enter_stage": "anchor, name=",
    "place_with": "val, with_val",
    "treduce": "fun, xs, schedule, axis=, operation=",
    "treduce_i": "fun, length, schedule, operation=, axis=",
    "Concat": "axis=",
    "mpmd_jit_with_loop": "fun, mpmd_mesh, *, in_shardings=, out_shardings=, in_specs=, out_specs=, static_argnums=, "
    "static_argnames=, donate_argnums=, donate_argnames=, abstracted_axes=, compiler_options=, use_pgle=",
    "mpmd_jit_by_yield": "fun, mpmd_mesh, *, target_num_stages=, in_shardings=, out_shardings=, static_argnums=, "
    "static_argnames=, donate_argnums=, donate_argnames=, abstracted_axes=, compiler_options=, use_pgle=",
    "mpmd_jit_rev": "fun, mpmd_mesh, *, out_refs, in_shardings=, out_shardings=, static_argnums=, static_argnames=, "
    "donate_argnums=, donate_argnames=, abstracted_axes=, compiler_options=, use_pgle=",
    "BaseSchedule": "num_stages",
    "InterleavedBaseSchedule": "num_stages, mpmd_dim",
    "InterleavedZeroBubble": "num_stages, mpmd_dim",
    "Task": "stage_id, mubatch_idx, fwd_or_bwd, latency",
    "Task.make": "stage_id, mubatch_idx, fwd_or_bwd, latency=",
    "Std1F1B": "num_stages, mpmd_dim=",
    "Eager1F1B": "num_stages, mpmd_dim=",
    "GPipe": "num_stages, mpmd_dim=",
    "ZeroBubble": "num_stages",
    "cross_mpmd_stack": "arrays, axis=",
    "collect_task_times_ms": "enabled=",
    "spmd_to_mpmd_reshard": "mpmd_mesh, spmd_arrays, mpmd_shardings, threshold=",
    "mpmd_to_spmd_reshard": "mpmd_mesh, mpmd_arrays, spmd_shardings, threshold=",
}
ATTRIBUTES = {
    "MpmdMesh": "mpmd_dim mpmd_axis unstack device_mpmd_idx mpmd_idx_for_mesh my_mpmd_axis_index my_mpmd_group_mesh",
    "MpmdArray": "spec shape dtype ndim sharding is_mpmd_replicated is_partially_addressable to_mpmd_local_array "
    "first_mpmd_replica _partially_addressable_arrays _mpmd_local_sharding __int__ __format__ __repr__",
    "MpmdSharding": "sharding",
}
INSTANCES = ["Add", "Max"]
OTHER = ["DualPipeV", "Interleaved1F1B", "InterleavedGPipe", "KimiK2", "cross_mpmd_all_reduce"]
EMPTY = inspect.Parameter.empty


def named(path: str) -> object:
    found: object = jaxpp
    for part in path.split("."):
        found = getattr(found, part)
    return found


def parameters(path: str) -> list[inspect.Parameter]:
    found = list(inspect.signature(named(path)).parameters.values())  # type: ignore[arg-type]
    return found[1:] if found and found[0].name == "self" else found


@pytest.mark.parametrize("path", SIGNATURES)
def test_whatever_jaxpp_may_be_given_is_taken(path: str):
    ours = parameters(path)
    by_name = {p.name: p for p in ours}
    positions = [p.name for p in ours if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    by_keyword = False
    for position, item in enumerate(filter(None, SIGNATURES[path].split(", "))):
        name, optional = item.rstrip("="), item.endswith("=")
        if name == "*":
            by_keyword = True
            continue
        parameter = by_name[name]
        assert parameter.kind is not parameter.POSITIONAL_ONLY, f"{name} may be given by name"
        if optional:
            assert parameter.default is not EMPTY, f"{name} may be left out"
        if not by_keyword:
            assert positions[position] == name, f"{name} may be given in position {position}"
    for parameter in ours:
        optional = parameter.default is not EMPTY or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        wanted = re.search(rf"\b{parameter.name}\b", SIGNATURES[path])
        assert optional or wanted, f"{parameter.name} would have to be given here alone"


def test_defaults_are_those_of_jaxpp():
    for function in (jaxpp.treduce, jaxpp.treduce_i):
        defaults = inspect.signature(function).parameters
        assert defaults["operation"].default == (jaxpp.Concat(), jaxpp.Add)
        assert defaults["axis"].default == 0
    for path in ("mpmd_jit_with_loop", "mpmd_jit_by_yield"):
        assert all(not p.default for p in parameters(path) if p.kind is p.KEYWORD_ONLY)
    assert inspect.signature(jaxpp.collect_task_times_ms).parameters["enabled"].default is True
    assert inspect.signature(jaxpp.cross_mpmd_stack).parameters["axis"].default == 0
    assert jaxpp.Concat().axis == 0


def test_schedules_take_the_number_of_ranks_by_position_and_by_name():
    for schedule in (
        jaxpp.Interleaved1F1B(8, 4),
        jaxpp.Interleaved1F1B(num_stages=8, mpmd_dim=4),
        jaxpp.Interleaved1F1B(8, 4, True),
        jaxpp.Interleaved1F1B(num_stages=8, mpmd_dim=4, fuse_steady_state=True),
        jaxpp.KimiK2(8, 4, False),
        jaxpp.InterleavedGPipe(8, 4),
        jaxpp.DualPipeV(8, 4),
        jaxpp.DualPipeV(num_stages=8, mpmd_dim=4),
    ):
        assert isinstance(schedule, jaxpp.BaseSchedule)
        assert (schedule.num_stages, schedule.mpmd_dim) == (8, 4)
    assert jaxpp.Interleaved1F1B(8, 4, True).fuse_steady_state
    assert jaxpp.Interleaved1F1B(8, 4, True) != jaxpp.Interleaved1F1B(8, 4)
    for one_each in (jaxpp.Std1F1B, jaxpp.Eager1F1B, jaxpp.GPipe):
        assert one_each(4, mpmd_dim=4).mpmd_dim == one_each(num_stages=4).mpmd_dim == 4
        with pytest.raises(ValueError, match=r"num_stages=8 and mpmd_dim=4. Use 4 stages, or Interleaved1F1B"):
            one_each(8, 4)


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes(owner: str):
    for name in ATTRIBUTES[owner].split():
        assert hasattr(getattr(jaxpp, owner), name), name


def test_the_table_of_the_documentation_has_every_name():
    table = (Path(__file__).parents[2] / "docs" / "jaxpp.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)", table, re.MULTILINE))
    tops = {path for path in SIGNATURES if "." not in path} | set(INSTANCES) | set(OTHER)
    assert tops | set(REMEDIES) <= listed
    own = {"GPipe", "Last", "Op", "mpmd_jit"}
    assert set(jaxpp.__all__) - own <= listed
    assert all(hasattr(jaxpp, name) for name in tops)


@pytest.mark.parametrize("name", REMEDIES)
def test_a_name_we_have_not_got_says_what_to_use(name: str):
    with pytest.raises(AttributeError, match=re.escape(f"jaxpp_flax.api has no {name}: ")):
        getattr(jaxpp, name)
    assert not hasattr(jaxpp, name)


def test_a_misspelt_name():
    with pytest.raises(AttributeError, match=r"has no attribute 'treduc'\. Did you mean 'treduce'"):
        _ = jaxpp.treduc
