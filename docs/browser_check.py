"""Open every page of the built site in Chromium, and report what is cut or wider than the page.

sphinx-build -q -W docs build/site
python docs/browser_check.py build/site    # --browser PATH for another browser

At 1,300 pixels each block of code, each table and the page fit; at 400 pixels, a telephone, the
page and its images do, and wide code scrolls inside its block. Exits with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

WIDTHS = (1300, 400)

# A frame has the width that it is given; a headless window is never narrower than 500.
HARNESS = """<!doctype html><body><script>
const [pages, widths] = %s
const shown = (frame, url) => new Promise(done => {
  frame.onload = done
  frame.src = url
})
const described = element =>
  `${element.tagName.toLowerCase()} "${element.textContent.trim().slice(0, 60)}"`

function faults(page, width, view) {
  const root = view.document.documentElement
  const too_wide = element => element.scrollWidth > element.clientWidth
  const found = []
  if (root.scrollWidth > width) {
    found.push(`the page is ${root.scrollWidth} wide`)
    for (const element of view.document.querySelectorAll("main *"))
      if (element.getBoundingClientRect().right > width && !in_scroller(element, view))
        found.push(`beyond the edge: ${described(element)}`)
  }
  const cut = width < 1000 ? "" : "pre, .pst-scrollable-table-container"
  for (const element of cut ? view.document.querySelectorAll(cut) : [])
    if (too_wide(element))
      found.push(`${element.scrollWidth} in ${element.clientWidth}: ${described(element)}`)
  for (const image of view.document.querySelectorAll("main img"))
    if (!image.naturalWidth) found.push(`no image: ${image.src}`)
    else if (image.width > image.parentElement.clientWidth + 1)
      found.push(`${image.width} wide: ${image.src}`)
  return found.map(fault => [page, width, fault])
}

function in_scroller(element, view) {
  for (let above = element.parentElement; above; above = above.parentElement)
    if (["auto", "scroll"].includes(view.getComputedStyle(above).overflowX)) return true
  return false
}

async function check() {
  const found = []
  for (const width of widths) {
    const frame = document.body.appendChild(document.createElement("iframe"))
    frame.width = width
    frame.height = 900
    frame.style.border = 0
    for (const page of pages) {
      await shown(frame, "/" + page)
      found.push(...faults(page, width, frame.contentWindow))
    }
    frame.remove()
  }
  return found
}
check().catch(error => [["the check itself", 0, String(error)]]).then(found =>
  fetch("/found", {method: "POST", body: JSON.stringify(found)}))
</script>"""


def check(site: Path, browser: str, timeout: float) -> list[tuple[str, int, str]]:
    """Return (page, width, fault) for each fault of the site."""
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
    harness = (HARNESS % json.dumps([pages, WIDTHS])).encode()
    found, asked, done = [], [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path != "/check":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(harness)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.extend(tuple(fault) for fault in json.loads(body))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Other hosts have fonts and scripts that no page needs: they are not asked.
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--remote-debugging-port=0",  # else it ends when the page is loaded
        ]  # fmt: skip
        address = f"http://127.0.0.1:{server.server_address[1]}/check"
        process = subprocess.Popen(
            [browser, *options, address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if not done.wait(timeout):
                raise TimeoutError(
                    f"{browser} did not open {len(pages)} pages in {timeout:.0f} s. The last it "
                    f"asked for: {asked[-1:] or 'none'}. Give --timeout more seconds."
                )
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    print(
        f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {len(found)} faults"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument(
        "--browser", default=shutil.which("chromium") or shutil.which("google-chrome")
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for all pages"
    )
    arguments = parser.parse_args()
    if arguments.browser is None:
        parser.error("no chromium and no google-chrome on PATH: give --browser")
    if not (arguments.site / "index.html").is_file():
        parser.error(f"{arguments.site} has no index.html: build the site first")
    faults = check(arguments.site, arguments.browser, arguments.timeout)
    for page, width, fault in faults:
        print(f"{page} at {width}: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
