"""Low-rank adapters (LoRA) on the linear layers of an NNX model, and their sum with the weights.

A layer with an adapter has the class and the state of `nnx.LoRALinear`: the parameters of the layer keep their paths,
and the factors are `lora/lora_a` and `lora/lora_b` beside them. So weights of the plain model fit the adapted one, and
a layer that ends a stage still does: the mark comes after the adapter's term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.globs import NameFilter, matches, matches_any
from jaxpp_flax.layers.axis_names import axis_names_key
from jaxpp_flax.layers.nnx import StageMeta
from jaxpp_flax.layers.stage_class import origin_of, stage_class

__all__ = ["add_lora", "merge_lora"]

M = TypeVar("M", bound=nnx.Module)

_LAYERS = (nnx.Linear, nnx.LinearGeneral)


def add_lora(
    model: M,
    *,
    rank: int,
    alpha: float | None = None,
    layers: NameFilter = "*",
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> M:
    """Add an adapter to layers of `model`, in place, and return the model.

    The result of an adapted layer is `layer(x) + alpha / rank * (x @ lora_a @ lora_b)`, in the dtype of `layer(x)`.
    `lora_b` is initialised with zeros, so at first the model's results are those without adapters. The paths of other
    parameters and the pipeline stages do not change, and an adapted layer is still an instance of its old class. To
    train only the adapters, use `PipelineTrainer(..., training=Training(wrt=nnx.LoRAParam))`.

    Args:
      model: a module with `nnx.Linear` and `nnx.LinearGeneral` layers, such as those of `nnx.MultiHeadAttention`.
      rank: the inner dimension: `lora_a` has shape (inputs, rank), `lora_b` has shape (rank, outputs). Several input
        or output axes of a layer count as one.
      alpha: the adapter's term is scaled by `alpha / rank`. None stands for `rank`: a scale of 1.
      layers: which layers get an adapter: globs on their paths ("blocks/*/attention/*"), or a function of the path.
      param_dtype: the dtype of `lora_a` and `lora_b`.
      rngs: its stream `params` gives the keys for `lora_a`.

    Raises:
      TypeError: if `model` is no NNX module.
      ValueError: if `rank` or `alpha` is no number above 0; if a glob matches no layer; if a layer has an adapter
        already, other axes than the last ones of its input, or a kernel of another shape. The model is not changed.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
      >>> model = add_lora(model, rank=2, alpha=4, layers="layers/0", rngs=nnx.Rngs(2))
      >>> model.layers[0].lora.lora_a.shape, model.layers[0].lora.lora_b.shape
      ((4, 2), (2, 8))
      >>> len(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
      2
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"add_lora needs an instance of an nnx.Module, got {type(model).__name__}.")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r}: it must be a whole number above 0.")
    scale = 1.0 if alpha is None else alpha / rank
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"alpha={alpha!r}: it must be a number above 0, or None.")
    chosen = _chosen(model, layers)
    for path, layer in chosen.items():
        _check_layer(path, layer)
    for layer in chosen.values():
        layer.lora = _factors(layer, rank, param_dtype, rngs)
        layer.lora_scale = scale
        object.__setattr__(layer, "__class__", _Adapted._stage_class_of(type(layer)))
    return model


@without_ambient_mesh  # the weights may lie on one device
def merge_lora(model: M) -> M:
    """Add the product of each adapter's factors to its layer's kernel, and remove the adapters; return the model.

    The model is changed in place: `merge_lora(trainer.gather_model())` is the plain model with the trained weights, and
    has the parameters of the model before `add_lora`. The sum is computed in float32 and rounded once to the kernel's
    dtype. The adapters of `nnx.LoRALinear` are merged too.

    Raises:
      TypeError: if `model` is no NNX module.
      ValueError: if no layer has an adapter; if an `nnx.LoRA` belongs to no linear layer, such as one that wraps a
        module; if the kernel of a layer with an adapter is used elsewhere too: by a tied layer, or a tied embedding.

    Example:
      >>> import jax.numpy as jnp
      >>> model = add_lora(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(1))
      >>> model.lora.lora_b[...] = jnp.ones((2, 4))
      >>> x = jnp.ones((1, 3))
      >>> adapted = model(x)
      >>> bool(jnp.allclose(merge_lora(model)(x), adapted, rtol=1e-5)), type(model) is nnx.Linear
      (True, True)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"merge_lora needs an instance of an nnx.Module, got {type(model).__name__}.")
    for layer, plain in _adapted_layers(model, "merge_lora").values():
        kernel, factors = jnp.asarray(layer.kernel[...]), (layer.lora.lora_a[...], layer.lora.lora_b[...])
        whole = (slice(None),) * kernel.ndim
        layer.kernel[...] = merged_part(kernel, whole, kernel.shape, factors, getattr(layer, "lora_scale", 1.0))
        for name in ("lora", "lora_scale"):
            if hasattr(layer, name):
                delattr(layer, name)
        object.__setattr__(layer, "__class__", plain)
    return model


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model: the paths of its layer's kernel and of its factors, and the scale of their product."""

    kernel: str
    factors: tuple[str, str]
    scale: float


def find_adapters(model: Any) -> list[Adapter]:
    """Return the adapters that `merge_lora` would merge; the model may be abstract.

    Raises:
      ValueError: as `merge_lora`, but not for a model without adapters.

    Example:
      >>> find_adapters(add_lora(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rank=2, alpha=4, rngs=nnx.Rngs(1)))
      [Adapter(kernel='kernel', factors=('lora/lora_a', 'lora/lora_b'), scale=2.0)]
    """
    if not any(isinstance(module, nnx.LoRA) for _, module in nnx.iter_modules(model)):
        return []
    layers = [layer for layer, _ in _adapted_layers(model, "find_adapters").values()]
    names = {id(node): _path_text(path) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    return [
        Adapter(
            names[id(layer.kernel)],
            (names[id(layer.lora.lora_a)], names[id(layer.lora.lora_b)]),
            getattr(layer, "lora_scale", 1.0),
        )
        for layer in layers
    ]


def merged_part(
    piece: jax.Array, index: Sequence[slice], shape: Sequence[int], factors: Sequence[Any], scale: float
) -> jax.Array:
    """Return a part of a kernel with the adapter's term added, in float32 and rounded once to the kernel's dtype.

    Args:
      piece: `kernel[index]`.
      index: a slice for each axis.
      shape: of the kernel.
      factors: `lora_a` and `lora_b`, whole, on the device of `piece`.
      scale: of the product of the factors.
    """
    a, b = (jnp.asarray(factor, jnp.float32) for factor in factors)
    term = jnp.reshape(scale * jnp.matmul(a, b, precision="highest"), shape)[tuple(index)]
    return (piece.astype(jnp.promote_types(piece.dtype, jnp.float32)) + term).astype(piece.dtype)


def _adapted_layers(model: nnx.Module, caller: str) -> dict[str, tuple[Any, type]]:
    """Return the layers with an adapter by path, each with its class without one.

    Raises:
      ValueError: see `merge_lora`.
    """
    modules: dict[str, Any] = {_path_text(path): module for path, module in nnx.iter_modules(model)}
    plain = {path: _class_without_adapter(type(module)) for path, module in modules.items()}
    adapted = {path: (modules[path], cls) for path, cls in plain.items() if cls is not None}
    factors = {id(layer.lora) for layer, _ in adapted.values()}
    others = sorted(p for p, module in modules.items() if isinstance(module, nnx.LoRA) and id(module) not in factors)
    if others or not adapted:
        found = f"the nnx.LoRA at {others[0]!r} belongs to no linear layer" if others else "no layer has an adapter"
        raise ValueError(f"{caller}: {found}. It merges the adapters of add_lora and of nnx.LoRALinear.")
    owners: dict[int, str] = {}
    for path, (layer, _) in adapted.items():
        other = owners.setdefault(id(layer.kernel), path)
        if other != path:
            raise ValueError(
                f"{caller}: the layers {other!r} and {path!r} share a kernel, and each has an adapter of its own: one "
                "kernel cannot be merged with both. Give the layers kernels of their own."
            )
    _check_alone(model, adapted, caller)
    return adapted


def _check_alone(model: nnx.Module, adapted: Mapping[str, tuple[Any, type]], caller: str) -> None:
    """Refuse an adapted layer whose kernel is used elsewhere too: the merged kernel would be used there.

    A module that is used several times is one layer, with its adapter everywhere.
    """
    kernels = {id(layer.kernel) for layer, _ in adapted.values()}
    for paths in nnx.find_duplicates(model, only=lambda _, node: id(node) in kernels):
        first, second, *_ = sorted(map(_path_text, paths), key=lambda path: path.rpartition("/")[0] not in adapted)
        raise ValueError(
            f"{caller}: layers share a kernel: {first!r}, with an adapter, is also {second!r}, without one. The sum of "
            "kernel and adapter would change both. Give the adapted layer a kernel of its own before: "
            "`layer.kernel = nnx.Param(layer.kernel[...])`."
        )


class _Adapted(nnx.Module, metaclass=StageMeta):
    """The second base of an adapted layer's class, whose `__call__` adds the adapter's term before a stage's mark."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        origin = origin_of(cls)
        if origin is not None and origin[0] is _Adapted:  # not for a `PipelineStage` of an adapted layer
            cls.__call__ = _with_adapter(cls.__call__)  # type: ignore[method-assign]

    @classmethod
    def _stage_class_of(cls, module_class: Any, name: str | None = None, remat: Any = None) -> type:
        return stage_class(_Adapted, module_class, pytree=module_class._pytree__is_pytree)


def _with_adapter(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call, updated=())  # not the attributes of `call`: they would say that this function marks its result
    def adapted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, inputs, *args, **kwargs)
        shape = (*inputs.shape[: inputs.ndim - _num_input_axes(self)], self.lora.in_features)
        term = self.lora_scale * self.lora(jnp.reshape(inputs, shape))
        return result + jnp.reshape(term, result.shape).astype(result.dtype)

    return adapted


def _class_without_adapter(cls: Any) -> type | None:
    """Return the class that a layer's class was before `add_lora`; None for a layer without an adapter."""
    if cls is nnx.LoRALinear:
        return nnx.Linear
    origin = origin_of(cls)
    if origin is None or origin[0] is _Adapted:
        return None if origin is None else origin[1]
    base, inner, name, remat = origin  # a stage, perhaps made of an adapted layer
    plain = _class_without_adapter(inner)
    return None if plain is None else base._stage_class_of(plain, name, remat)


def _chosen(model: nnx.Module, layers: NameFilter) -> dict[str, Any]:
    known = {_path_text(path): module for path, module in nnx.iter_modules(model) if isinstance(module, _LAYERS)}
    globs = [] if callable(layers) else [layers] if isinstance(layers, str) else list(layers)
    is_chosen = matches_any(layers)
    chosen = {path: module for path, module in known.items() if is_chosen(path)}
    unused = [glob for glob in globs if not any(matches(path, glob) for path in known)]
    if unused or not chosen:
        wrong = f"layers: no layer matches {unused[0]!r}" if unused else f"layers={layers!r} chooses no layer"
        names = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
        raise ValueError(f"{wrong}. nnx.Linear and nnx.LinearGeneral get adapters; the model has {names or 'none'}.")
    return chosen


def _check_layer(path: str, layer: Any) -> None:
    if hasattr(layer, "lora"):
        raise ValueError(f"layer {path!r} has an adapter already. Call merge_lora(model) before another add_lora.")
    axes = _num_input_axes(layer)
    if isinstance(layer, nnx.LinearGeneral):
        if layer.batch_axis or tuple(layer.axis) != tuple(range(-axes, 0)):
            raise ValueError(
                f"layer {path!r} has axis={layer.axis}, batch_axis={dict(layer.batch_axis)}: an adapter needs the last "
                "axes of the input, counted from the end, and no batch axis. Leave the layer out of `layers`."
            )
        expected = (*layer.in_features, *layer.out_features)
    else:
        expected = (layer.in_features, layer.out_features)
    if tuple(layer.kernel.shape) != expected:
        raise ValueError(
            f"layer {path!r} has a kernel of shape {tuple(layer.kernel.shape)} instead of {expected}. If nnx.vmap made "
            "a stack of layers, call add_lora in the function that nnx.vmap maps."
        )


def _num_input_axes(layer: Any) -> int:
    return len(layer.in_features) if isinstance(layer, nnx.LinearGeneral) else 1


def _factors(layer: Any, rank: int, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LoRA:
    axes = _num_input_axes(layer)
    inputs, outputs = math.prod(layer.kernel.shape[:axes]), math.prod(layer.kernel.shape[axes:])
    of_a, of_b = _annotations(layer.kernel)
    return nnx.LoRA(
        inputs, rank, outputs,
        dtype=layer.dtype, param_dtype=param_dtype, rngs=rngs, a_metadata=of_a, b_metadata=of_b,
    )  # fmt: skip


def _annotations(kernel: nnx.Variable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sharding metadata of the two factors: the kernel's, with nothing for the axis of size `rank`."""
    metadata = kernel.get_metadata()
    key = axis_names_key(metadata)
    names = None if key is None else metadata[key]
    if key is None or not isinstance(names, (tuple, list, PartitionSpec)) or len(names) != 2 or len(kernel.shape) != 2:
        return {}, {}  # factors without annotations are copied to all devices of their stage: they are small
    rules = {name: metadata[name] for name in ("sharding_rules", "eager_sharding") if metadata.get(name) is not None}
    kind = PartitionSpec if isinstance(names, PartitionSpec) else lambda *parts: tuple(parts)
    return {key: kind(names[0], None), **rules}, {key: kind(None, names[1]), **rules}


def _path_text(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
