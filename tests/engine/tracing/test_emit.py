"""`emit`: the one way in which passes make equations."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.tracing.ir import Constant, Graph, Value, bodies, emit, from_jaxpr, values


def test_equations_of_a_function_applied_to_atoms():
    a, b = (Value(jax.typeof(jnp.ones(3))) for _ in range(2))
    two = Constant(2.0, jax.typeof(jnp.float32(2)))
    captured = np.arange(3, dtype=np.float32)
    equations, (total, same) = emit(lambda x, k: (x * k + captured, x), [a, two], [b, None])
    assert total is b
    assert same is not a  # a result that comes out as it went in is copied to a value of its own
    assert values([a, two, b]) == [a, b]
    results = Graph((a,), (total, same), tuple(equations)).run(jnp.ones(3))
    np.testing.assert_array_equal(results, [[2.0, 3.0, 4.0], [1.0, 1.0, 1.0]])


def test_labels_of_another_equation():
    graph, _ = from_jaxpr(jax.make_jaxpr(jnp.sin)(1.0), transposed=True, late=True)
    (old,) = graph.equations
    (new,), _ = emit(jnp.cos, old.inputs, like=old)
    assert (new.name, new.source, new.transposed, new.late) == ("cos", old.source, True, True)


def test_bodies_are_the_jaxprs_inside_of_an_equation():
    (call,) = from_jaxpr(jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0))[0].equations[-1:]
    assert sorted(body.eqns[0].primitive.name for body in bodies(call.params)) == ["cos", "sin"]
