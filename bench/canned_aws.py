"""DynamoDB and SQS as a process that has its answers ready, so that the CPU time of a caller is its own.

    python -m bench.canned_aws

Prints its port. Each answer is one that AWS might give, checksums included; nothing is kept. `GET /` tells which calls
came since it was last asked, and how many bytes the last one of each had.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

seen: dict[str, list[int]] = {}
"""Of each operation: how often it came, and the bytes of its last body."""


def answer(operation: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The body of a reply."""
    match operation:
        case "GetItem":  # any API key is known
            return {"Item": {"key_hash": asked["Key"]["key_hash"], "client_id": {"S": "alice"}, "name": {"S": "Alice"}}}
        case "PutItem":
            return {}
        case "SendMessage":
            attributes = asked.get("MessageSystemAttributes")
            reply = {
                "MessageId": "0d7b5c6c-1f2e-4f6e-9d0a-1f2e3d4c5b6a",
                "MD5OfMessageBody": hashlib.md5(asked["MessageBody"].encode()).hexdigest(),
            }
            return reply | ({"MD5OfMessageSystemAttributes": "0" * 32} if attributes else {})  # which nobody checks
        case "GetQueueAttributes":
            return {"Attributes": dict.fromkeys(asked["AttributeNames"], "3")}
        case _:
            raise ValueError(f"{operation} is not known here")


class Canned(BaseHTTPRequestHandler):
    """Both services, by the JSON protocols that the SDK speaks to them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet a reply

    def do_POST(self) -> None:
        """A call."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        service, _, operation = self.headers["X-Amz-Target"].rpartition(".")
        entry = seen.setdefault(operation, [0, 0])
        entry[0], entry[1] = entry[0] + 1, len(body)
        self._reply(json.dumps(answer(operation, json.loads(body))).encode(), "1.1" if "SQS" in service else "1.0")

    def do_GET(self) -> None:
        """What came."""
        told = json.dumps(seen).encode()
        seen.clear()
        self._reply(told, "1.0")

    def _reply(self, body: bytes, version: str) -> None:
        self.send_response(200)
        self.send_header("x-amzn-RequestId", "5C6C1F2E0D7B4F6E9D0A1F2E3D4C5B6A")
        self.send_header("x-amz-crc32", str(zlib.crc32(body)))
        self.send_header("Content-Type", f"application/x-amz-json-{version}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def main() -> None:
    """Answer until killed."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
