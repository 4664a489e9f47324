"""The command that explains an error by its code, without a network: ``python -m jaxpp_flax explain JPF500``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import resources

from rich.console import Console
from rich.markdown import Markdown

__all__ = ["entries", "main"]


def entries() -> dict[str, str]:
    """The entries of the error index by their codes, in Markdown.

    Example:
      >>> print(entries()["JPF503"].splitlines()[0])
      ### JPF503 ValuesMismatchError
    """
    # An entry is a label, a heading with the code, and paragraphs up to the next heading or label.
    text = (resources.files("jaxpp_flax") / "errors.md").read_text(encoding="utf-8")
    parts = re.findall(r"^(### (JPF\d+) .+?)(?=^\(jpf|^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return {code: entry.strip() for entry, code in parts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the entry of a code or name; without one, all codes with their errors. Return 2 for an unknown code."""
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax explain", description=__doc__)
    parser.add_argument(
        "code",
        nargs="?",
        help="as an error's last line tells it, such as JPF500, or the error's name; all if none is given",
    )
    code = parser.parse_args(arguments).code
    known = entries()
    of_names = {entry.split()[2].upper(): entry for entry in known.values()}  # ### JPF503 ValuesMismatchError
    if code is None:
        print(*(entry.partition("\n")[0].lstrip("# ") for entry in known.values()), sep="\n")
    elif (entry := (known | of_names).get(code.upper())) is not None:
        Console().print(Markdown(entry))
    else:
        parser.error(f"there is no error {code!r}; without a code, this command lists all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
