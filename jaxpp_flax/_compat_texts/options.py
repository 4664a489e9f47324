"""The options of JAX as texts: those of the environment variables that it reads when it is imported."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["set_option"]

# The type of each option, and what else its command line flag has; JAX documents no list of them.
_flags: dict[str, Any] = getattr(jax.config, "meta", {})
_TRUTHS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def set_option(variable: str, text: str) -> bool:
    """Set an option to what JAX reads from an environment variable.

    Returns:
      Whether there is such an option.

    Raises:
      ValueError, TypeError: if the option does not take the text, as where JAX reads it itself.

    Example:
      >>> set_option("JAX_TRACER_ERROR_NUM_TRACEBACK_FRAMES", "5"), set_option("JAX_AND_ME", "5")
      (True, False)
    """
    option = variable.lower()
    if option not in _flags:
        return False
    kind, value = _flags[option][0], text
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise ValueError(f"{text!r} is no truth value, such as 1 or 0")
        value = _TRUTHS[text.lower()]
    elif kind in (int, float):
        value = kind(text)
    jax.config.update(option, value)
    return True
