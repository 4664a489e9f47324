"""The table of primitives: it has a row for each primitive of JAX, or the primitive is listed here."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from jaxpp_flax.engine.tracing.primitives import _BY_NAME, Batch, Cost, facts_of  # pyright: ignore[reportPrivateUsage]
from tests.running import run_python

# The rows would say nothing more than the safe answers do.
UNCLASSIFIED = {
    "references, logs and boxes": """
        accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get get_global get_variable log_extend
        log_read masked_load masked_swap new_box new_log new_ref new_variable run_scoped run_state set_variable swap
    """,
    "calls of the host, effects": """
        check debug_callback debug_print delay inspect_sharding io_callback pure_callback semaphore_read
        semaphore_signal semaphore_wait shape_assertion unreachable
    """,
    "inside Pallas kernels": "multiple_of num_programs program_id",
    "collectives between programs": "precv psend",
    "opened before the table is asked (`_compat_hijax.py`)": "call_hi_primitive call_hi_primitive_linearized",
    "opaque calls, and calls inside transformations": """
        call_exported create_linear custom_jvp_call_jaxpr custom_lin
        custom_vmap_call dce_sink jaxpr_call mpmd_map pin remat_opt stage tie unpin xla_metadata_call
        xla_metadata_value
    """,
    "kernels of cuDNN": """
        dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper scaled_matmul scaled_matmul_wrapper
    """,
    "symbolic shapes, layouts": "broadcast_to dim_as_value relayout",
    "ours, with rules of their own": "treduce",
}


# In a process of its own, where no test has made primitives.
NAMES = """
import gc, json
import jax, jax.experimental.pallas
from jax.extend.core import Primitive, primitives
from jaxpp_flax.engine.tracing.primitives import Facts, facts_of
known = {of for of in gc.get_objects() if isinstance(of, Primitive)}
known |= {of for name, of in vars(primitives).items() if name.endswith("_p")}
print(json.dumps([[of.name for of in known if (facts_of(of) == Facts()) == lacks] for lacks in (True, False)]))
"""


def test_every_primitive_has_a_row_or_is_listed():
    """A new JAX may add primitives: give them rows in `tracing/primitives.py`, or list them here."""
    listed = {name for names in UNCLASSIFIED.values() for name in names.split()} | {"while"}  # whose answers are safe
    without, with_row = map(set, json.loads(run_python("-c", NAMES).stdout.splitlines()[-1]))
    assert len(with_row) > 200
    assert without - listed == set()
    assert with_row & listed == set(), "a primitive with a row is listed"


def test_a_primitive_without_a_row_gets_the_safe_answers():
    """Also if it shares its name with one of JAX's."""
    for name in ("add", "test_unknown"):
        facts = facts_of(Primitive(name))
        assert (facts.cost, facts.batch, facts.linear, facts.body) == (Cost.LOOP, Batch.LOST, None, None)


@pytest.mark.parametrize(
    ("function", "cost"),
    [
        (jnp.exp, Cost.LIGHT),
        (jnp.cumsum, Cost.KERNEL),
        (lambda x: jax.lax.cummin(x, axis=0), Cost.KERNEL),
        (lambda x: jax.lax.approx_max_k(x, 1)[0], Cost.KERNEL),
        (lambda x: jax.lax.linalg.schur(x)[0], Cost.KERNEL),
        (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"), Cost.KERNEL),
        (jnp.sort, Cost.READING),
        (lambda x: x @ x, Cost.PRODUCT),
        (lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 0, jnp.sin, x), Cost.LOOP),
    ],
)
def test_the_cost_of_what_jax_binds(function, cost):
    order = list(Cost)
    equations = jax.make_jaxpr(function)(jnp.ones((4, 4))).jaxpr.eqns
    found = [facts_of(e.primitive).cost for e in equations if facts_of(e.primitive).body is None]
    inner = [facts_of(i.primitive).cost for e in equations if facts_of(e.primitive).body for i in _body(e).eqns]
    assert max([*found, *inner], key=order.index) is cost


def _body(equation):
    body = equation.params[facts_of(equation.primitive).body]
    return getattr(body, "jaxpr", body)


def test_a_dimension_may_be_a_number_of_numpy():
    assert facts_of(jax.lax.split_p).dimensions_in({"axis": np.int64(1)}) == (1,)
    assert facts_of(jax.lax.reduce_sum_p).dimensions_in({"axes": (0, 2)}) == (0, 2)


def test_calls_in_an_order_stay_whole():
    """`jax.experimental.overlap.program_order` of JAX 0.12: only a call that keeps no order may be opened."""
    facts, body = _BY_NAME["program_order"], object()
    assert [facts.body_in({"call_jaxpr": body, "enforce": enforce}) for enforce in (True, False)] == [None, body]
    assert facts.cost is Cost.LOOP  # it is never cheap enough to be computed twice


def test_a_collective_in_two_halves_costs_its_start():
    costs = {name: _BY_NAME[name].cost for name in ("psum_start", "psum_invariant_start", "psum_done")}
    assert [*costs.values()] == [Cost.KERNEL, Cost.KERNEL, Cost.VIEW]
