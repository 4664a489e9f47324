"""Transport by `jax.device_put` between devices of different processes, for backends that can do it.

JAX pairs the two ends by a hidden counter in each process: only the order of the calls pairs a send with its receive.
So every process walks all parcels of the program in one global order, even parcels between two other processes. The
order cannot differ between processes: they compare their programs when they compile them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jax

from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, Transport, TransportError

__all__ = ["CrossHostDevicePut"]

_REMEDY = (
    "Use transport 'transfer', or set jax_cross_host_transfer_socket_address and jax_cross_host_transport_addresses "
    "before JAX starts."
)


class CrossHostDevicePut(Transport):
    """Transport by `jax.device_put`.

    GPU and TPU backends offer it by themselves. On CPU, and between slices, it needs
    `jax_cross_host_transfer_socket_address` ("127.0.0.1:41300", with a port other than 0) and
    `jax_cross_host_transport_addresses` ("127.0.0.1:0"), both set before JAX's first use.

    A silent peer cannot be abandoned: arrays awaited from it never become ready, so the process must end.
    """

    needs_global_order: ClassVar[bool] = True

    def connect(self, parcels: Sequence[Parcel], timeout_s: float) -> None:
        """Refuse, on CPU without the setting, parcels that JAX would refuse at the first transfer."""
        origins = {
            device.platform for parcel in parcels for sharding in parcel.origins for device in sharding.device_set
        }
        if "cpu" in origins and _setting() == "":
            raise TransportError(f"transport 'device_put' cannot copy between processes on CPU. {_REMEDY}")

    def send(self, values: Sequence[jax.Array], parcel: Parcel, tag: Tag) -> None:
        """Take part in the copies as the source."""
        self._copy(parcel, [[value] for value in values])

    def recv(self, parcel: Parcel, tag: Tag) -> list[jax.Array]:
        """Take part in the copies as the target."""
        return self._copy(parcel, [[] for _ in parcel.shapes])

    def pass_by(self, parcel: Parcel, tag: Tag) -> None:
        """Take part in the copies without arrays, to advance JAX's counter."""
        self._copy(parcel, [[] for _ in parcel.shapes])

    def _copy(self, parcel: Parcel, shards: Sequence[list[jax.Array]]) -> list[jax.Array]:
        sources = [
            jax.make_array_from_single_device_arrays(shape.shape, origin, own, dtype=shape.dtype)
            for shape, origin, own in zip(parcel.shapes, parcel.origins, shards, strict=True)
        ]
        try:
            return [
                jax.device_put(source, shape.sharding) for source, shape in zip(sources, parcel.shapes, strict=True)
            ]
        except ValueError as error:
            raise TransportError(
                f"transport 'device_put' cannot copy from process {parcel.source} to process {parcel.target}: {error}. "
                f"{_REMEDY}"
            ) from error


def _setting() -> str | None:
    """Return the address on which JAX's transfers between hosts listen; None if this JAX has no such setting."""
    try:
        return jax.config.read("jax_cross_host_transfer_socket_address")
    except AttributeError:
        return None
