"""Asks, and prints the answer while it is written. Needs the packages httpx2 and websockets.

    BACKBURNER_API_URL=https://… BACKBURNER_API_KEY=bb_… python follow.py "Why is the sky blue?"

A connection may break at any time; this one is opened again and goes on where it was, without a gap or a repeat.
"""

import json
import os
import sys
import time
from typing import Any

import httpx2
import websockets.sync.client as sockets
from websockets.exceptions import ConnectionClosed

FINAL = {"completed", "failed", "cancelled", "expired"}


class Answer:
    """What has come of the answer. A retry of the job writes another draft of it, from the beginning."""

    def __init__(self) -> None:
        self.text = ""
        self.draft = 0

    @property
    def position(self) -> int:
        """Where to go on, in characters."""
        return len(self.text)

    def take(self, frame: dict[str, Any]) -> str:
        """Add a piece; return what was new of it."""
        if frame["draft"] > self.draft:
            self.draft, self.text = frame["draft"], ""
        if frame["draft"] < self.draft or not frame["position"] <= self.position < frame["end"]:
            return ""
        new: str = frame["text"][self.position - frame["position"] :]
        self.text += new
        return new


def follow(api: httpx2.Client, job_id: str) -> dict[str, Any]:
    """Print the answer as it comes; return the job once it has ended."""
    answer = Answer()
    while True:
        ticket = api.post("/tickets").raise_for_status().json()
        try:
            with sockets.connect(f"{ticket['socket_url']}?ticket={ticket['ticket']}") as socket:
                after = {"draft": answer.draft, "position": answer.position}
                socket.send(json.dumps({"action": "subscribe", "job_id": job_id, "after": after}))
                for message in socket:
                    frame = json.loads(message)
                    if frame["type"] == "delta":
                        print(answer.take(frame), end="", flush=True)
                    elif frame["type"] == "job" and frame["job"]["status"] in FINAL:
                        job: dict[str, Any] = frame["job"]
                        too_large = "result_note" in job
                        return api.get(f"/jobs/{job_id}").raise_for_status().json() if too_large else job
                    elif frame["type"] == "error":
                        raise RuntimeError(frame["problem"]["detail"])
        except (ConnectionClosed, OSError):
            time.sleep(0.5)


def main() -> None:
    """Ask what the command line says."""
    headers = {"Authorization": f"Bearer {os.environ['BACKBURNER_API_KEY']}"}
    with httpx2.Client(base_url=os.environ["BACKBURNER_API_URL"], headers=headers, timeout=30) as api:
        asked = {"prompt": sys.argv[1], "stream": True}
        job_id = api.post("/jobs", json=asked).raise_for_status().json()["job_id"]
        job = follow(api, job_id)
    print()
    print(job["result"]["text"] if job["status"] == "completed" else job.get("error", job["status"]))


if __name__ == "__main__":
    main()
