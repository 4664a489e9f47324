"""The arguments of a call: leaves, static arguments, and what messages call them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.signature import Signature, Statics, arguments_of, both_ways, paths_of, without_statics
from tests.engine.toys import mesh_of


def function(params: Any, batch: Any, power: Any = 1, *, scale: Any = 1.0) -> Any:
    return params, batch, power, scale


PARAMS, BATCH = {"b": jnp.ones(2), "a": jnp.ones(3)}, (jnp.ones(4), None)


@pytest.mark.parametrize(
    ("kwargs", "paths"),
    [({}, ["[0]['a']", "[0]['b']", "[1][0]", "[2]"]), ({"scale": 2}, ["[0]['a']", "[0]['b']", "[1][0]", "[2]"])],
    ids=["positions", "keywords"],
)
def test_a_call_is_put_together_as_it_was(kwargs: dict[str, Any], paths: list[str]):
    leaves, tree = Statics(function, *both_ways(function, None, "scale")).flatten((PARAMS, BATCH, 3), kwargs)
    assert list(paths_of(without_statics(tree))) == paths
    args, named = arguments_of(tree, leaves)
    assert (args[2], named) == (3, kwargs)
    assert jax.tree.structure(args[:2]) == jax.tree.structure([PARAMS, BATCH])


def test_static_arguments_are_no_leaves():
    statics = Statics(function, *both_ways(function, -1, None))  # `power`: a keyword-only parameter has no position
    leaves, tree = statics.flatten((PARAMS, BATCH, 3), {"scale": 2.0})
    traced = jax.jit(function, static_argnums=2).trace(PARAMS, BATCH, 3, scale=2.0)
    assert without_statics(tree) == traced.in_tree
    assert paths_of(traced.in_tree) == ("[0]['a']", "[0]['b']", "[1][0]", "['scale']")
    args, named = arguments_of(tree, leaves)
    assert (args[2], named) == (3, {"scale": 2.0})


def test_the_tree_of_a_call_tells_static_arguments_apart():
    statics = Statics(function, *both_ways(function, 2, None))
    trees = [statics.flatten((PARAMS, BATCH, power), {})[1] for power in (1, 1.0, True, 2, 1)]
    assert len(set(trees)) == 4
    assert trees[0] == trees[4]


@pytest.mark.parametrize("passed", ["position", "name"])
def test_every_type_of_a_static_argument_runs_its_own_program(passed: str):
    """As under `jax.jit`: 2, 2.0 and True are equal for Python, and give results of other types."""
    statics = [2, 2.0, True, 1, 0.0, False, 2]

    def step(x: jax.Array, static: Any) -> Any:
        return x + 1, jnp.asarray(static)

    x = jnp.ones(4)
    pipelined, plain = mpmd_jit(step, mesh_of(1), static_argnums=1), jax.jit(step, static_argnums=1)
    for static in statics:
        _, actual = pipelined(x, static=static) if passed == "name" else pipelined(x, static)
        _, expected = plain(x, static)
        assert (actual.dtype, float(actual)) == (expected.dtype, float(expected)), static
    assert len(set(pipelined._placed.values())) == len(statics) - 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({}, r"a compiled step was called .* made for: argument\[0\]: got float32\[3\], .* Make it again"),
        ({"function": "f"}, r"f was called .* made for float32\[2\]\. Make it again"),
    ],
    ids=["compiled", "lowered"],
)
def test_messages_name_the_front(words: dict[str, Any], text: str):
    leaves, tree = jax.tree.flatten(((jnp.ones(2),), {}))
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    signature = Signature.of(tree, [struct], [jax.sharding.PartitionSpec()], tree, (False,), **words)
    assert signature.leaves_of(leaves, {}) == leaves
    with pytest.raises(TypeError, match=text):
        signature.leaves_of([jnp.ones(3)], {})


@pytest.mark.parametrize("donate", [{"donate_argnums": -1}, {"donate_argnames": "batch"}], ids=str)
@pytest.mark.parametrize("passed", ["position", "name"])
def test_donated_arguments_are_those_of_jit(donate: dict[str, Any], passed: str):
    def step(params: Any, batch: Any) -> Any:
        return params, batch + 1

    args, kwargs = ((PARAMS,), {"batch": jnp.ones(2)}) if passed == "name" else ((PARAMS, jnp.ones(2)), {})
    placed = mpmd_jit(step, mesh_of(1), **donate).place(*args, **kwargs)
    assert placed.signature.donated == (False, False, True)


def test_a_donated_parameter_that_the_function_lacks():
    with pytest.raises(ValueError, match=r"donate_argnums=\(7,\), but only accepts 4 positional|accepts 3 positional"):
        mpmd_jit(function, mesh_of(1), donate_argnums=7)
