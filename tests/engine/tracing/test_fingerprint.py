"""Fingerprints: equal for tasks that compute the same, whatever their names; different for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.interpreters import mlir

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.program.description import describe_graph
from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Constant, Graph, from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import GPipe
from tests.engine.toys import chain, gradients, mesh_of, partition_of
from tests.helpers import batch_of

X = np.ones((4, 4), np.float32)
UNLIKE = [(1, 1.0), (1, True), (0.0, -0.0), ((1, (2,)), (1, (2.0,))), ({1: 2}, {"1": 2})]


def primitive(name: str, lowered: Callable[[Any], Any] = lambda x: x) -> Any:
    """One that a user may define: of one array, with any parameters."""
    new = jex_core.Primitive(name)
    new.def_impl(lambda x, **_: lowered(x))
    new.def_abstract_eval(lambda x, **_: x)
    return new


DOUBLE, TRIPLE = primitive("user"), primitive("user")
IMPOSTOR = primitive("jit")


def bound(to: Any, **params: Any) -> Callable[[Any], Any]:
    return lambda x: to.bind(x, **params)


def inside(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same one call deeper, where equations are JAX's own."""
    return jax.jit(lambda x: fun(x))


def graph_of(fun: Callable[..., Any], *args: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(fun)(*args))[0]


def same(*graphs: Graph) -> bool:
    prints = Fingerprinter()
    return len({prints.graph(g) for g in graphs}) == 1


def custom_square() -> Callable[[Any], Any]:
    """A function with a derivative of its own, written anew."""

    @jax.custom_vjp
    def square(x: Any) -> Any:
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    return square


def by_scan(factor: float, length: int | None = None) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda c, r: (c * factor + r, None), x[0], x[:length])[0]


EQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "names": (lambda a: jnp.sin(a) + 1, lambda b: jnp.sin(b) + 1),
    "names of calls": (jax.jit(lambda a: a * 2), jax.jit(lambda other: other * 2)),
    "inner jaxprs": (by_scan(2.0), by_scan(2.0)),
    "names of values": tuple((lambda x, n=n: checkpoint_name(x, n)) for n in "ab"),
    "a rule of one's own": (custom_square(), custom_square()),
    "custom rules": (lambda x: jax.nn.silu(x), lambda x: jax.nn.silu(x)),
}
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "primitive": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "literal": (lambda x: x + 1.0, lambda x: x + 2.0),
    "parameter": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "wiring": (lambda x: jnp.sin(x) - jnp.cos(x), lambda x: jnp.cos(x) - jnp.sin(x)),
    "output order": (lambda x: (jnp.sin(x), jnp.cos(x)), lambda x: (jnp.sin(x), jnp.cos(x))[::-1]),
    "literal in an inner jaxpr": (by_scan(2.0), by_scan(3.0)),
    "signed zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    **{f"parameters {a!r} and {b!r}": (bound(DOUBLE, by=a), bound(DOUBLE, by=b)) for a, b in UNLIKE},
    "primitives of one name": (bound(DOUBLE), bound(TRIPLE)),
    "a parameter called name": (bound(DOUBLE, name="a"), bound(DOUBLE, name="b")),
    "a parameter called identifier": (bound(DOUBLE, identifier=1), bound(DOUBLE, identifier=2)),
    "a user's primitive called jit": (bound(IMPOSTOR, name="a"), bound(IMPOSTOR, name="b")),
    "type of a literal": (lambda x: x.astype(jnp.int32) + jnp.int32(1), lambda x: x.astype(jnp.float32) + 1),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_equal(pair: tuple[Any, Any]):
    graphs = [graph_of(fun, X) for fun in pair]
    assert same(*graphs)
    one, other = ([line.rpartition(" at ")[0] for line in describe_graph(graph)] for graph in graphs)
    assert one == other, "what is compiled once is described alike"


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_different(pair: tuple[Any, Any]):
    assert not same(*(graph_of(fun, X) for fun in pair))
    assert not same(*(graph_of(inside(fun), X) for fun in pair))


def test_stages_with_primitives_of_one_name_compute_each_its_own():
    """Two middle stages that differ in nothing but the primitive's identity."""
    kinds = [primitive("scaled", lambda x, by=by: x * by) for by in (2.0, 3.0)]
    for kind, by in zip(kinds, (2.0, 3.0), strict=True):
        mlir.register_lowering(kind, mlir.lower_fun(lambda x, by=by: x * by, multiple_results=False))

    def model(x: jax.Array) -> jax.Array:
        x = mark_stage_end(x + 1)
        for kind in kinds:
            x = mark_stage_end(kind.bind(x))
        return x + 1

    x = jnp.asarray(X)
    # Small integers: exact in any order.
    np.testing.assert_array_equal(mpmd_jit(model, mesh_of(4))(x), jax.jit(model)(x))


def test_a_constant_without_a_form_of_bytes_is_kept():
    """A PRNG key's identity stands for it: another one at the same address later would else pass for it."""
    prints, key = Fingerprinter(), jax.random.key(0)
    aval = jax.typeof(key)
    seen = {prints.graph(Graph((), (Constant(jax.random.key(n), aval),), ())) for n in range(20)}
    assert len(seen) == 20
    assert prints.graph(Graph((), (Constant(key, aval),), ())) == prints.graph(Graph((), (Constant(key, aval),), ()))


@pytest.mark.parametrize("other", [X[:2], X.astype(np.int32), X[0]], ids=["shape", "dtype", "rank"])
def test_types_of_the_inputs(other: np.ndarray):
    assert not same(graph_of(lambda x: x + x, X), graph_of(lambda x: x + x, other))


def test_the_order_of_the_inputs():
    assert not same(graph_of(lambda x, y: x - y, X, X), graph_of(lambda x, y: y - x, X, X))


def test_middle_stages_are_equal_and_others_are_not():
    part = partition_of(gradients(GPipe(4)), chain(4), batch_of(2))
    prints = Fingerprinter()
    key = {t.name: prints.graph(t.graph) for t in part.tasks}
    assert key["fwd_1"] == key["fwd_2"]
    assert key["bwd_1"] == key["bwd_2"]
    assert len(set(key.values())) == 6
    again = partition_of(gradients(GPipe(4)), chain(4), batch_of(2))
    assert {t.name: prints.graph(t.graph) for t in again.tasks} == key
