"""A scanned stack of layers as stages: each stage scans its own layers; checkpoints convert in both directions.

A model that scans L equal layers keeps their parameters in one stack. A scan cannot be cut inside. So the stack is
divided into parts: each part is a scan over its own slice of the stack, and the model may be cut between the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.layers.marking import is_marked

__all__ = ["join_layers", "join_scanned", "scan", "split_layers", "split_scanned"]

_PART = "stage_{}"


def scan(target: Any, *, stages: int | Sequence[int], length: int | None = None, **options: Any) -> Callable[..., Any]:
    """Divide `flax.linen.scan` into parts with a mark after each part, so that the stack may be cut into stages.

    Args:
      target: the layer's class, or `nn.remat` of it; a layer is called as `layer(carry, *inputs) -> (carry, output)`.
      stages: the number of parts, or the number of layers in each part. Cuts are possible between the parts: the
        pipeline may have fewer stages.
      length: the number of layers.
      options: the other arguments of `nn.scan`.

    Returns:
      A function to use like the layer's class, as with `nn.scan`. The variables of part i are below `stage_<i>`.
      `split_scanned` and `join_scanned` convert checkpoints from and to the model with `nn.scan`. Initial values and
      dropout masks depend on the paths, so they differ from those of `nn.scan`. For equal initial values, initialise
      the model with `nn.scan`, and convert its variables with `split_scanned`.

    Raises:
      TypeError: if `target` is not a Linen Module class.
      ValueError: if `length` is missing, the parts do not sum up to the number of layers, the variables of an option
        belong to all layers, the option is `reverse=True`, an output axis is no number, or `target` is marked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class Layer(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, _):
      ...         return nn.Dense(3)(x), None
      >>> layers = scan(Layer, stages=2, length=4, variable_axes={"params": 0}, split_rngs={"params": True})
      >>> variables = layers().init(jax.random.key(0), jnp.ones((1, 3)), None)
      >>> variables["params"]["stage_1"]["Dense_0"]["kernel"].shape
      (2, 3, 3)
    """
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        name = getattr(target, "__name__", type(target).__name__)
        raise TypeError(f"scan takes a Linen Module class, got {name}. Put the body into a Module's `__call__`.")
    if length is None:
        raise ValueError(
            "scan cannot divide a stack of unknown length into stages: give length=, its number of layers."
        )
    if is_marked(target.__call__):
        raise ValueError(
            f"scan got {target.__name__}, each of whose layers ends with a mark; a scan cannot be cut between its "
            "layers. Pass the class without @pipeline_stage or PipelineStage: scan marks the end of each part. To "
            f"allow a cut after every layer, use stages={length}."
        )
    lengths = _lengths(stages, length)
    _check_options(options)
    # Linen names unnamed modules after their class.
    divided = type(f"Scan{target.__name__}", (_DividedScan,), {"__module__": target.__module__})

    def make(*args: Any, name: str | None = None, **kwargs: Any) -> nn.Module:
        return divided(target, lengths, args, kwargs, options, name=name)

    return make


def _check_options(options: Mapping[str, Any]) -> None:
    for option in ("variable_carry", "variable_broadcast"):
        if options.get(option):
            raise ValueError(
                f"scan cannot divide layers with {option}={options[option]!r}: these variables belong to all layers. "
                "Make such parameters outside of the stack, and pass them with "
                "in_axes=nn.broadcast."
            )
    if options.get("reverse"):
        raise ValueError(
            "scan cannot divide with reverse=True: stages run in the order of the layers. Reverse the stack."
        )
    if any(not isinstance(axis, int) for axis in jax.tree.leaves(options.get("out_axes", 0))):
        raise ValueError(
            f"scan got out_axes={options['out_axes']!r}: the outputs of all stages are put together along one axis. "
            "Give its number."
        )


class _DividedScan(nn.Module):
    target: Any
    lengths: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    options: Mapping[str, Any]

    @nn.compact
    def __call__(self, carry: Any, *inputs: Any) -> tuple[Any, Any]:
        in_axes = self.options.get("in_axes", 0)
        axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(inputs)
        outputs: list[Any] = []
        start = 0
        for i, length in enumerate(self.lengths):
            name = _PART.format(i)
            part = nn.scan(self.target, length=length, **self.options)(*self.arguments, **self.keywords, name=name)
            carry, output = part(carry, *_slice_inputs(axes, inputs, start, length))
            carry = mark_stage_end(carry, "/".join((*self.path, name)), closes_block=True)
            outputs.append(output)
            start += length
        out_axes = self.options.get("out_axes", 0)
        return carry, _map_prefix(lambda axis, *parts: jnp.concatenate(parts, axis), out_axes, *outputs)


def _slice_inputs(axes: tuple[Any, ...], inputs: tuple[Any, ...], start: int, length: int) -> tuple[Any, ...]:
    def cut(axis: Any, x: Any) -> Any:
        return jax.lax.slice_in_dim(jnp.asarray(x), start, start + length, axis=axis) if isinstance(axis, int) else x

    return _map_prefix(cut, axes, inputs)


def _map_prefix(function: Callable[..., Any], prefix: Any, *trees: Any) -> Any:
    """Call `function(p, *leaves)` for all leaves; `p` is the leaf of the prefix tree above these leaves."""
    return jax.tree.map(lambda p, *subtrees: jax.tree.map(lambda *xs: function(p, *xs), *subtrees), prefix, *trees)


def _lengths(stages: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the number of layers in each part."""
    if isinstance(stages, int):
        if not 1 <= stages <= layers:
            raise ValueError(f"stages={stages} for {layers} layers: give a number from 1 to {layers}.")
        share, rest = divmod(layers, stages)
        return tuple(share + (i < rest) for i in range(stages))
    lengths = tuple(stages)
    if any(n < 1 for n in lengths):
        raise ValueError(f"stages={lengths} for {layers} layers: give sizes of 1 or more.")
    if sum(lengths) != layers:
        raise ValueError(f"stages={lengths} sum up to {sum(lengths)}, but there are {layers} layers.")
    return lengths


def split_layers(stack: Any, stages: int | Sequence[int], *, axis: int = 0) -> list[Any]:
    """Divide stacked layers: an NNX module made under `nnx.vmap`, or any tree of stacked arrays.

    Each part has its own leaves, so a stage holds the parameters, gradients and optimizer state of only its own layers.
    If the stages slice one stacked leaf instead, the results are correct, but each stage holds the whole stack, and
    sums gradients of the size of the whole stack, which are mostly zeros.

    Args:
      stack: a tree; each array has the layers along `axis`.
      stages: the number of parts, or the number of layers in each part.
      axis: the axis of the layers.

    Raises:
      ValueError: if there is no array; if an array lacks the axis or has another number of layers; if the parts do not
        sum up to the number of layers.

    Example:
      >>> import numpy as np
      >>> [part["w"].shape for part in split_layers({"w": np.zeros((5, 2))}, 2)]
      [(3, 2), (2, 2)]
    """
    if isinstance(stack, nnx.Module):
        graphdef, state = nnx.split(stack)
        return [nnx.merge(graphdef, part) for part in split_layers(state, stages, axis=axis)]
    sizes: list[tuple[str, int]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(stack):
        shape, where = jnp.shape(leaf), jax.tree_util.keystr(path)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{where} has shape {shape}, and no axis {axis} of layers. Take arrays that all layers share out of it."
            )
        sizes.append((where, shape[axis]))
    if not sizes:
        raise ValueError("split_layers got a stack without a single array, so the number of layers is unknown.")
    other = next(((where, size) for where, size in sizes if size != sizes[0][1]), None)
    if other is not None:
        raise ValueError(
            f"{sizes[0][0]} holds {sizes[0][1]} layers along axis {axis}, but {other[0]} holds {other[1]}. Stack all "
            "arrays along one axis, and keep what all layers share out of the stack."
        )
    lengths = _lengths(stages, sizes[0][1])

    def part(start: int, length: int) -> Any:
        def cut(x: Any) -> Any:
            return x[(*(slice(None),) * (axis % x.ndim), slice(start, start + length))]

        return jax.tree.map(cut, stack)

    return [part(sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def join_layers(parts: Sequence[Any], *, axis: int = 0) -> Any:
    """Invert `split_layers`. Arrays on a pipeline's ranks are copied to the host; NumPy arrays stay NumPy arrays.

    Example:
      >>> import numpy as np
      >>> join_layers([{"w": np.zeros((3, 2))}, {"w": np.ones((2, 2))}])["w"].shape
      (5, 2)
    """
    if not parts:
        raise ValueError("join_layers got no parts: pass what `split_layers` returned.")
    if isinstance(parts[0], nnx.Module):
        return nnx.merge(nnx.graphdef(parts[0]), join_layers([nnx.state(part) for part in parts], axis=axis))

    def join(*leaves: Any) -> Any:
        if all(isinstance(x, jax.Array) for x in leaves):
            return jnp.concatenate(leaves, axis)
        if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            data = [np.asarray(jax.random.key_data(jnp.asarray(x))) for x in leaves]
            return jax.random.wrap_key_data(
                jnp.asarray(np.concatenate(data, axis)), impl=jax.random.key_impl(jnp.asarray(leaves[0]))
            )
        return np.concatenate([np.asarray(x) for x in leaves], axis)

    return jax.tree.map(join, *parts)


def split_scanned(tree: Any, name: str, stages: int | Sequence[int], *, axis: int = 0) -> Any:
    """Convert a tree of the model with one scan to a tree of the model divided into stages.

    Args:
      tree: variables, gradients, an optimizer's state, or an `nnx.State`; it holds the stack under `name`, once or
        several times. The other parts of the tree do not change.
      name: the name of the scanned submodule.
      stages: as in `scan`.
      axis: the axis of the layers, as in `variable_axes`.

    Raises:
      ValueError: if no node has the name, or a node with the name is not a stack of layers.

    Example:
      >>> import numpy as np
      >>> variables = {"params": {"layers": {"w": np.zeros((4, 2))}}}
      >>> split = split_scanned(variables, "layers", 2)
      >>> sorted(split["params"]["layers"]), split["params"]["layers"]["stage_0"]["w"].shape
      (['stage_0', 'stage_1'], (2, 2))
    """

    def split(stack: Any, is_nnx: bool) -> Any:
        parts = split_layers(stack, stages, axis=axis)
        return {i if is_nnx else _PART.format(i): part for i, part in enumerate(parts)}

    return _replace(tree, name, split)


def join_scanned(tree: Any, name: str, *, axis: int = 0) -> Any:
    """Invert `split_scanned`.

    Raises:
      ValueError: if no node has the name, or a node with the name is not divided.

    Example:
      >>> import numpy as np
      >>> split = {"layers": {"stage_0": {"w": np.zeros((2, 2))}, "stage_1": {"w": np.ones((1, 2))}}}
      >>> join_scanned(split, "layers")["layers"]["w"].shape
      (3, 2)
    """

    def join(divided: Any, is_nnx: bool) -> Any:
        keys = [i if is_nnx else _PART.format(i) for i in range(len(divided))]
        if set(keys) != set(divided):
            raise ValueError(
                f"{name!r} holds {list(divided)}: it is not divided into stages, so there is nothing to join."
            )
        return join_layers([divided[key] for key in keys], axis=axis)

    return _replace(tree, name, join)


def _replace(tree: Any, name: str, convert: Callable[[Any, bool], Any]) -> Any:
    """Replace each subtree below a key `name`, if it holds arrays, with `convert(subtree, is_nnx)`."""
    found = 0

    def has_name(node: Any) -> bool:
        return isinstance(node, Mapping) and name in node

    def visit(node: Any, is_nnx: bool) -> Any:
        nonlocal found
        if isinstance(node, nnx.State):
            mapping: Any = node.raw_mapping
            return nnx.State(visit(mapping, True) if has_name(mapping) else visit_all(mapping, True))
        if not has_name(node):
            return node
        found += 1
        items = {key: value if key == name else visit_all(value, is_nnx) for key, value in node.items()}
        if jax.tree.leaves(items[name]):  # an optimizer's state holds an empty node in place of frozen layers
            items[name] = convert(items[name], is_nnx)
        return type(node)(items)

    def visit_all(node: Any, is_nnx: bool) -> Any:
        def stop(n: Any) -> bool:
            return isinstance(n, nnx.State) or has_name(n)

        return jax.tree.map(lambda n: visit(n, is_nnx), node, is_leaf=stop)

    result = visit_all(tree, False)
    if not found:
        raise ValueError(f"nothing in the tree is called {name!r}: pass the name of the scanned submodule.")
    return result
