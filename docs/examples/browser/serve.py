"""The page's own server: it has the API key, which no browser must ever see. Needs nothing but Python.

    BACKBURNER_API_URL=https://… BACKBURNER_API_KEY=bb_… python serve.py [PORT]

A real one asks its users to log in first, and notes whose job is whose.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
BODY_BYTES_MAX = 100_000


def api(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of what Backburner answers."""
    request = urllib.request.Request(  # noqa: S310  our own address
        os.environ["BACKBURNER_API_URL"] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['BACKBURNER_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Page(BaseHTTPRequestHandler):
    """The page, and the three things that it asks for."""

    def do_GET(self) -> None:
        """The page's files."""
        name, kind = FILES.get(self.path, ("", ""))
        self._reply(200 if name else 404, (HERE / name).read_bytes() if name else b"", kind or "text/plain")

    def do_POST(self) -> None:
        """A new job, a ticket, or a job that was too large for the WebSocket."""
        asked = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), BODY_BYTES_MAX)))
        if self.path == "/ask":
            self._reply(*api("POST", "/jobs", {"prompt": asked["prompt"], "stream": True}))
        elif self.path == "/ticket":
            self._reply(*api("POST", "/tickets"))
        elif self.path == "/job" and str(asked["job_id"]).replace("_", "").isalnum():
            self._reply(*api("GET", f"/jobs/{asked['job_id']}"))
        else:
            self._reply(404, b"{}")

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8000), Page)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
