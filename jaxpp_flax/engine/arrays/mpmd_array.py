"""`MpmdArray`: one logical array that lives on some ranks of an `MpmdMesh`."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxpp_flax import _compat
from jaxpp_flax.engine.arrays import replicas
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.processes import errors_naming_failed_process

__all__ = ["MpmdArray", "MpmdSharding"]


def _binary(function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Callable[[MpmdArray, Any], Any]:
    @without_ambient_mesh
    def method(self: MpmdArray, other: Any) -> Any:
        mine, other = self._beside(other)
        return function(other, mine) if reflected else function(mine, other)

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[MpmdArray], Any]:
    return without_ambient_mesh(lambda self: function(self._operand))


class MpmdArray:
    """A logical array on one or more ranks (groups of devices of a stage), with the same sharding inside each rank.

    An `MpmdArray` holds the replicas of this process's ranks as `jax.Array`s, and nothing for ranks of other
    processes. It is a leaf of a pytree and behaves like an array: NumPy, `jax.numpy` functions, operators, `float(x)`
    and printing work in each process with a local replica. `jax.jit` and the rest of JAX use `x.as_jax_array()`, one
    array over all its ranks. The operators and `jnp.asarray(x)` use this array too if all ranks are local.

    Args:
      partially_addressable_arrays: the local replicas: a mapping from ranks, or a sequence (then their devices give the
        ranks). Each replica is on its rank's devices, sharded by `mpmd_sharding.spec`.
      mpmd_sharding: the ranks of the array, and its sharding inside each rank.
      shape, dtype: the shape and dtype of the whole array; needed only if no replica is local.

    Raises:
      ValueError: if a replica is not on the devices of a rank of the sharding, has another sharding, or differs from
        the others in shape or dtype; or if no replica is local and `shape` or `dtype` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jaxpp_flax import MpmdMesh
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> sharding = MpmdSharding(mesh, {1}, P())
      >>> x = MpmdArray([jax.device_put(jnp.arange(3.0), sharding.local_sharding(1))], sharding)
      >>> x
      MpmdArray(shape=(3,), dtype=float32, mpmd_idxs=(1,), sharding=NamedSharding(mesh=Mesh('stage': 1...), ...))
      >>> print(x * 2, float(x[2]), jax.jit(jnp.sum)(x))
      [0. 2. 4.] 2.0 3.0

    The idea and the names come from NVIDIA's JaxPP (Xhebraj, Lee, Chen and Grover, 2024).
    """

    __slots__ = ("__weakref__", "_parts", "_sharding", "aval")

    _sharding: MpmdSharding
    _parts: Mapping[int, jax.Array]
    aval: Any

    # As in jax.Array: a NumPy array on the left leaves the operation to this class.
    __array_priority__: ClassVar[int] = 100

    def __init__(
        self,
        partially_addressable_arrays: Mapping[int, jax.Array] | Sequence[jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
    ) -> None:
        self._sharding = mpmd_sharding if mpmd_sharding.mesh_ids else mpmd_sharding.on_ranks(mpmd_sharding.ranks)
        self._parts = replicas.replicas_by_rank(partially_addressable_arrays, mpmd_sharding)
        self.aval = replicas.checked_type(self._parts, mpmd_sharding, shape, dtype)

    @classmethod
    def _from_parts(cls, sharding: MpmdSharding, parts: Mapping[int, jax.Array], aval: Any) -> MpmdArray:
        """Make an array for the runtime, without checks or copies.

        `parts` has its ranks in ascending order; `aval` has `shape` and `dtype`.
        """
        self = object.__new__(cls)
        self._sharding = sharding
        self._parts = parts
        self.aval = aval
        return self

    # Type and place.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.aval.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of one replica: the sum over its shards."""
        return self.size * self.aval.dtype.itemsize

    @property
    def weak_type(self) -> bool:
        """True if the other operand decides the dtype of a result, as with Python scalars."""
        return bool(getattr(self.aval, "weak_type", False))

    @property
    def sharding(self) -> MpmdSharding:
        """The sharding over the ranks of all processes."""
        return self._sharding

    @property
    def spec(self) -> PartitionSpec:
        """The sharding inside each rank."""
        return self._sharding.spec

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The ranks that have a replica, ascending."""
        return self._sharding.ranks

    @property
    def is_mpmd_replicated(self) -> bool:
        """True if several ranks have a replica."""
        return len(self._sharding.ranks) > 1

    @property
    def is_partially_addressable(self) -> bool:
        """True if this process holds a replica, or a part of one."""
        return bool(self._parts)

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices of the array belong to this process."""
        return self._sharding.is_fully_addressable

    _partially_addressable_arrays = property(lambda self: self._parts)

    # Values.

    @property
    def _value(self) -> jax.Array:
        """The first local replica; an error if there is none, or if it is deleted."""
        if self._parts:
            return self._alive(next(iter(self._parts)))
        process, owners = jax.process_index(), sorted({device.process_index for device in self._sharding.device_set})
        raise RuntimeError(
            f"MpmdArray {replicas.type_text(self)} has no values in process {process}: it lives on rank "
            f"{replicas.ranks_text(self.mpmd_idxs)}, whose devices belong to process {replicas.ranks_text(owners)}. "
            "Read it there (check `x.is_partially_addressable`), or copy it here with `mpmd_to_spmd_reshard`."
        )

    def _alive(self, rank: int) -> jax.Array:
        """Return the replica of a local rank; an error if it is deleted."""
        part = self._parts[rank]
        if part.is_deleted():
            raise RuntimeError(self._deleted_message(rank))
        return part

    def _deleted_message(self, rank: int) -> str:
        return (
            f"MpmdArray {replicas.type_text(self)} on rank {rank} has been deleted: it was donated to a call that "
            "reuses its memory (`donate_argnums`, a train step's state), or `.delete()` was called. Use what that call "
            "returned in its place, or hand in a copy: `jax.tree.map(jnp.copy, state)`."
        )

    @property
    def _operand(self) -> jax.Array:
        """The array that JAX reads: over all ranks, or the first local replica if some ranks are remote."""
        return self.as_jax_array() if len(self._parts) > 1 and self.is_fully_addressable else self._value

    def _beside(self, other: Any) -> tuple[Any, Any]:
        """Return operands for self and `other`: on the same ranks, or on one rank that both have."""
        if isinstance(other, MpmdArray):
            if self.mpmd_idxs == other.mpmd_idxs:
                return self._operand, other._operand
            mine, theirs = self._value, other._value
            common = next((rank for rank in self._parts if rank in other._parts), None)
            if common is not None:
                return self._parts[common], other._parts[common]
            if mine.devices() != theirs.devices():
                first, second = (
                    f"{replicas.type_text(x)} on rank {replicas.ranks_text(x.mpmd_idxs)}" for x in (self, other)
                )
                raise ValueError(
                    f"an operation takes {first} and {second}: no rank has both. Copy them to the host first "
                    "(`jax.device_get(tree)`), or compute inside the step, which moves the values it needs."
                )
            return mine, theirs
        if len(self._parts) > 1 and isinstance(other, jax.Array) and not isinstance(other, Tracer):
            devices = other.devices()
            replica = next((part for part in self._parts.values() if part.devices() == devices), None)
            return (self._operand if replica is None else replica), other
        return self._operand, other

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """The local replica; a list of replicas, by rank, if several are local; None if none is local."""
        if not self._parts:
            return None
        self._check_alive()
        parts = list(self._parts.values())
        return parts[0] if len(parts) == 1 else parts

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """The replica on the first of `mpmd_idxs`, or None if this replica is not local."""
        first = self._sharding.ranks[0]
        return self._alive(first) if first in self._parts else None

    def as_jax_array(self) -> jax.Array:
        """Return one `jax.Array` over the mesh of all its ranks; it shares memory with the replicas.

        The result has no shards if no replica is local. Its sharding is `self.sharding`.
        """
        self._check_alive()
        kept = self._sharding._union_ranks
        shards = [s.data for rank, x in self._parts.items() if rank in kept for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self._sharding, shards, dtype=self.dtype)

    def _check_alive(self) -> None:
        for rank in self._parts:
            self._alive(rank)

    # Memory.

    def is_deleted(self) -> bool:
        """Return True if the memory of a local replica has been freed; False if no replica is local."""
        return any(part.is_deleted() for part in self._parts.values())

    def delete(self) -> None:
        """Free the memory of the local replicas; a second call changes nothing."""
        for part in self._parts.values():
            part.delete()

    def block_until_ready(self) -> MpmdArray:
        """Wait until the local replicas are computed."""
        with errors_naming_failed_process():
            for part in self._parts.values():
                part.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Begin to copy the first local replica to the host, so that a later read does not wait."""
        if self._parts:
            next(iter(self._parts.values())).copy_to_host_async()

    # Protocols of NumPy, JAX and Python.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        with errors_naming_failed_process():
            value = np.asarray(self._value)
        # The host copy is cached and read-only, as for a jax.Array. So a writable array is a copy of the host copy.
        if copy:
            return np.array(value, dtype)
        return np.asarray(value, dtype) if copy is None else np.asarray(value, dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return self._operand

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return getattr(self._operand, name)
        raise AttributeError(f"MpmdArray has no attribute {name!r}; `jnp.asarray(x)` gives a jax.Array.")

    @without_ambient_mesh
    def __getitem__(self, index: Any) -> jax.Array:
        return self._operand[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an MpmdArray without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self._operand)

    def __bool__(self) -> bool:
        with errors_naming_failed_process():
            return bool(self._value)

    def __int__(self) -> int:
        with errors_naming_failed_process():
            return int(self._value)

    def __index__(self) -> int:
        return operator.index(self._value)

    def __float__(self) -> float:
        with errors_naming_failed_process():
            return float(self._value)

    def __complex__(self) -> complex:
        return complex(self._value)

    def __format__(self, format_spec: str) -> str:
        return repr(self) if self.shape and not format_spec else format(self._value, format_spec)

    def __repr__(self) -> str:
        # The text is the one of JaxPP. `np.asarray(x)` and `f"{loss:.4f}"` give the values.
        text = f"MpmdArray(shape={self.shape}, dtype={self.dtype}, mpmd_idxs={self.mpmd_idxs}"
        return f"{text}, sharding={self._sharding.sharding}{', deleted' if self.is_deleted() else ''})"

    def __copy__(self) -> MpmdArray:
        return self._from_parts(self._sharding, self._parts, self.aval)

    @without_ambient_mesh
    def __deepcopy__(self, memo: dict[int, Any]) -> MpmdArray:
        self._check_alive()
        parts = {rank: copy.deepcopy(part, memo) for rank, part in self._parts.items()}
        return self._from_parts(self._sharding, parts, self.aval)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a NumPy array: devices of this process mean nothing to another process."""
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            text = replicas.type_text(self)
            raise TypeError(f"MpmdArray {text} holds PRNG keys, which cannot be pickled: pickle their key_data.")
        return (np.asarray, (np.asarray(self),))

    # Operators work element by element, as for a jax.Array. So `==` gives an array, and there is no hash.
    __hash__: Any = None
    __eq__ = _binary(operator.eq)  # pyright: ignore[reportAssignmentType]
    __ne__ = _binary(operator.ne)  # pyright: ignore[reportAssignmentType]
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __add__, __radd__ = _binary(operator.add), _binary(operator.add, reflected=True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, reflected=True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, reflected=True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, reflected=True)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, reflected=True)
    __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, reflected=True)
    __divmod__, __rdivmod__ = _binary(divmod), _binary(divmod, reflected=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, reflected=True)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _binary(operator.matmul, reflected=True)
    __and__, __rand__ = _binary(operator.and_), _binary(operator.and_, reflected=True)
    __or__, __ror__ = _binary(operator.or_), _binary(operator.or_, reflected=True)
    __xor__, __rxor__ = _binary(operator.xor), _binary(operator.xor, reflected=True)
    __lshift__, __rlshift__ = _binary(operator.lshift), _binary(operator.lshift, reflected=True)
    __rshift__, __rrshift__ = _binary(operator.rshift), _binary(operator.rshift, reflected=True)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    __round__ = _unary(round)


# Attributes of jax.Array that users read from a loss or a parameter.
_METHODS = frozenset(
    "T all any argmax argmin argsort astype at clip conj copy cumprod cumsum diagonal dot flatten imag item itemsize "  # noqa: SIM905
    "mT max mean min prod ravel real repeat reshape round sort squeeze std sum swapaxes take tolist trace transpose "
    "var view".split()
)


_compat.register_array_type(MpmdArray, lambda array: jax.typeof(array.as_jax_array()), MpmdArray.as_jax_array)
