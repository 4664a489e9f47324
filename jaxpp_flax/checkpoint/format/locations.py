"""Where checkpoints are: directories of a file system, and buckets of Google's storage."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from etils import epath

# One slash is enough, since `pathlib` turns two slashes into one. A single letter is a drive, not a URL.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


def location(path: str | os.PathLike[str]) -> Path:
    """Return a path, or a URL of a file or an object, as a path that can be read and written.

    Paths on a file system become absolute. An object's path is an `epath.Path`, which has the methods of `pathlib`.

    Raises:
      ValueError: if nothing here reads and writes such a URL.
      ModuleNotFoundError: if the package for such a URL is not installed.

    Example:
      >>> location("file:///runs/gpt").as_posix()
      '/runs/gpt'
    """
    text = os.fspath(path)
    url = _URL.match(text)
    if url is None:
        return Path(path).expanduser().absolute()
    scheme = url[1].lower()
    if scheme == "file" and urlsplit(text).netloc in ("", "localhost"):
        return Path(unquote(urlsplit(text).path)).absolute()
    if scheme not in _PACKAGES:
        raise ValueError(f"the path {text} is on {scheme}:, which is neither a file system nor gs:// nor s3://.")
    _prepare(scheme, text)
    return cast(Path, epath.Path(f"{scheme}://{text[url.end() :]}"))


def checkpoint_location(path: str | os.PathLike[str]) -> Path:
    """Return a place for checkpoints, as `location` does.

    Raises:
      ValueError: if Orbax writes no arrays there.

    Example:
      >>> checkpoint_location("s3://bucket/gpt")
      Traceback (most recent call last):
      ValueError: the checkpoint path s3://bucket/gpt is on s3:, ... Mount the bucket (mountpoint-s3) ...
    """
    text = os.fspath(path)
    if text.lower().startswith("s3:"):
        raise ValueError(
            f"the checkpoint path {text} is on s3:, where Orbax writes no arrays. Mount the bucket (mountpoint-s3) and "
            "give the path in it; or use gs://, or a disk."
        )
    return location(path)


def need_disk(place: Path) -> Path:
    """Return a place of safetensors files; refuse a bucket.

    Example:
      >>> need_disk(location("/weights"))
      PosixPath('/weights')
    """
    if not is_on_disk(place):
        raise ValueError(
            f"{place} is in a bucket, and safetensors files are read and written on disks alone. Mount the bucket "
            "(gcsfuse, mountpoint-s3) and give the path in it, or copy the files from or to a disk."
        )
    return place


def is_on_disk(place: Path) -> bool:
    """Return True for a path of a file system."""
    return isinstance(place, Path)


def storage_of(directory: Path) -> Any:
    """Return TensorStore's description of a directory or a bucket's folder."""
    return {"driver": "file", "path": f"{directory}/"} if is_on_disk(directory) else f"{directory}/"


def _prepare(scheme: str, text: str) -> None:
    """Refuse a bucket without the package that reads it, and ask the bucket at each listing.

    A listing that was kept would lack what other processes have written since.
    """
    package = _PACKAGES[scheme]
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"the path {text} needs the package {package!r}, which is not installed: "
            "`pip install 'jaxpp-flax[buckets]'`."
        )
    from fsspec.config import conf

    for protocol in ("gcs", "gs", "s3"):
        conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
