"""An emulator of Google's storage on loopback, which keeps conditions on writes and can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "bucket"


class Faults:
    """Which requests fail: `refuses` gets the method and the address of each, and returns a status or None."""

    refuses: Callable[[str, str], int | None] = staticmethod(lambda method, address: None)


def answering(method: str) -> Callable[[Any], None]:
    return lambda handler: handler.answer(method)


@contextmanager
def storage_server() -> Iterator[tuple[str, Faults, Any]]:
    """Run the server; yield its address, its faults, and what it stores."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    faults = Faults()
    storage = emulator.Storage(use_memory_fs=True)
    storage.create_bucket(BUCKET, {"name": BUCKET})

    def generation(name: str) -> str:
        try:
            return storage.get_file_obj(BUCKET, name)["generation"]
        except Exception:
            return "0"

    class Handler(emulator.RequestHandler):
        """The emulator ignores conditions on the generation of an object, and does not tell it to readers."""

        def answer(self, method: str) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            self.name = query.get("name", [unquote(url.path.partition("/o/")[2])])[0]
            status = faults.refuses(method, self.path)
            wanted = query.get("ifGenerationMatch", [None])[0]
            if status is None and wanted is not None and wanted != generation(self.name):
                status = 412
            if status is None and "/moveTo/o/" in self.path:
                return self.move()
            if status is None:
                return emulator.Router(self).handle(method)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return self.send_error(status)

        def move(self) -> None:
            """By a copy. The emulator does not know this request, which clients then repeat for half a minute."""
            self.name = self.name.partition("/moveTo/o/")[0]
            self.path = self.path.replace("/moveTo/o/", f"/copyTo/b/{BUCKET}/o/")
            exists = generation(self.name) != "0"
            emulator.Router(self).handle("POST")
            if exists:
                storage.delete_file(BUCKET, self.name)

        do_GET, do_POST, do_PUT, do_DELETE, do_PATCH = map(  # noqa: N815 (the names of `http.server`)
            answering, ("GET", "POST", "PUT", "DELETE", "PATCH")
        )

        def end_headers(self) -> None:
            if self.name and "Content-type" not in self.headers:
                self.send_header("x-goog-generation", generation(self.name))
            super().end_headers()

    class Server(HTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: a client may close a connection before it has the whole answer."""

    with Server(("127.0.0.1", 0), partial(Handler, storage)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", faults, storage
        finally:
            server.shutdown()
            thread.join()
