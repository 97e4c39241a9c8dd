"""The HTTP API as `backburner submit` and `load` see it: a server that keeps jobs by their keys, and fails as told."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

KEY = "bb_fake"


@dataclass
class FakeApi:
    """`faults`: statuses, with headers, that the next POSTs are answered with; `ends`: how jobs end, by their prompts.

    A job has ended at its second look, unless `ends` has None for it: that one is never heard of again.
    """

    faults: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    ends: dict[str, str | None] = field(default_factory=dict)
    posts: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._reply(*fake.submit(body, self.headers))

            def do_GET(self) -> None:
                self._reply(*fake.look(self.path.rpartition("/")[2]))

            def _reply(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(text))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/api"

    def submit(self, body: dict[str, Any], headers: Any) -> tuple[int, Mapping[str, Any], Mapping[str, str]]:
        with self._lock:
            self.posts.append(body)
            if headers["authorization"] != f"Bearer {KEY}":
                return 401, {"code": "unauthorized", "detail": "no"}, {}
            if self.faults:
                status, more = self.faults.pop(0)
                return status, {"code": f"fault_{status}", "detail": "as told"}, more
            key = headers["idempotency-key"] or uuid.uuid4().hex
            job_id = self._ids.setdefault(key, f"job_{len(self._ids)}")
            self.jobs.setdefault(job_id, body)
            return 202, {"job_id": job_id, "status": "queued"}, {}

    def look(self, job_id: str) -> tuple[int, Mapping[str, Any], Mapping[str, str]]:
        with self._lock:
            self.looks[job_id] = self.looks.get(job_id, 0) + 1
            prompt = self.jobs[job_id]["prompt"]
            end = self.ends.get(prompt, "completed")
            if end is None or self.looks[job_id] < 2:
                return 200, {"job_id": job_id, "status": "processing"}, {}
            if end == "missing":
                return 404, {"code": "job_not_found", "detail": "gone"}, {}
            job: dict[str, Any] = {"job_id": job_id, "status": end, "created_at": 100, "finished_at": 103}
            if end == "completed":
                job["result"] = {"text": f"re: {prompt}"}
            else:
                job["error"] = {"code": "overloaded", "message": "busy", "retryable": True}
            return 200, job, {}
