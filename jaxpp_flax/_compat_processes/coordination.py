"""JAX's coordination service in a process of its own, and clients that outlive a broken connection to it."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import time
from collections.abc import Callable

import jax

from jaxpp_flax import _compat

__all__ = ["outlive_broken_connections", "start_coordination_service", "why_no_mtls"]

# JAX 0.12 has these; its environment variables are `JAX_MTLS_CERT_FILE` and so on.
_MTLS = ("jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file", "jax_mtls_peer_uri_prefix")
_CALLS, _PAUSE_SECONDS = 5, 0.02
# Longer than any run. Not all that XLA computes from these seconds has room for more.
_NEVER_SECONDS = 10**8


def why_no_mtls() -> str | None:
    """Return why the processes cannot connect as JAX's settings for mutual TLS ask; None if none is set.

    Example:
      >>> why_no_mtls()  # returns None
    """
    given = [name for name in _MTLS if getattr(jax.config, name, None) is not None]
    if not given:
        return None
    return (
        f"JAX's settings {given} ask for mutual TLS between the processes, but this package serves the coordination "
        "without TLS, and sends arrays so. Unset them, and keep the processes inside a trusted network; or connect the "
        "processes by `jax.distributed.initialize(mtls_cert_file=..., ...)`, without this package's launcher: then JAX "
        "serves the coordination with TLS, and arrays still travel without."
    )


def start_coordination_service(address: str, process_count: int) -> Callable[[], None] | None:
    """Serve JAX's coordination service in this process, for other processes to connect to.

    It ends no process because of another one, and counts none as lost.

    Returns:
      A function that ends the service; None if this JAX hides the service: then process 0 serves it.
    """
    try:
        service = _compat._runtime.get_distributed_runtime_service(
            address, process_count, heartbeat_timeout=_NEVER_SECONDS, shutdown_timeout=5, recoverable=True
        )
    except (AttributeError, TypeError):
        return None
    return service.shutdown


def outlive_broken_connections(timeout_s: int) -> bool:
    """Let this process live on when its connection to a service of `start_coordination_service` breaks.

    JAX's client asks the service once, for errors of the run, and waits for the answer until the end. It aborts the
    process if that call fails, also by a connection that is reset for a second. A second client with the same index
    asks too: then the service ends the first one's call, which that one takes for a good end. So the second
    client may go.

    Returns:
      Whether it took effect; False if this JAX hides its client.
    """
    state = _compat._distributed_state
    try:
        client = _compat._runtime.get_distributed_runtime_client(
            state.coordinator_address,
            state.process_id,
            init_timeout=timeout_s,
            heartbeat_timeout=_NEVER_SECONDS,
            shutdown_on_destruction=False,
            use_compression=True,  # as the first one: so they have one connection, which keeps their calls in order
        )
    except (AttributeError, TypeError):
        return False
    client.connect()
    # Its question has no answer. The service has certainly seen it once it has answered calls that came later.
    for _ in range(_CALLS):
        client.key_value_dir_get("jaxpp_flax/")
        time.sleep(_PAUSE_SECONDS)
    return True
