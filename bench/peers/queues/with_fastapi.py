"""FastAPI and a Redis list, as tutorials teach it: LPUSH, a worker's BRPOP, a status under the job's key.

https://fastapi.tiangolo.com/async/: `async def` with a library that is awaited, as redis-py can be. An idempotency key
is looked up, then set.
https://redis.io/docs/latest/commands/brpop/: what is popped is gone from Redis, whatever becomes of the worker.
https://cookbook.openai.com/examples/how_to_handle_rate_limits: tenacity, six attempts, a random exponential wait.
"""

import json
import sys
import threading
import uuid
from collections import Counter
from typing import Annotated, Any

import httpx2
import openai
import redis
import redis.asyncio
from fastapi import FastAPI, Header
from pydantic import BaseModel
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from bench.peers.queues.common import REDIS, THREADS, Job, ask, serve

r = redis.Redis.from_url(REDIS + "/0", decode_responses=True)
awaited = redis.asyncio.Redis.from_url(REDIS + "/0", decode_responses=True)
app = FastAPI()


class Asked(BaseModel):
    """The request's body."""

    prompt: str


@app.post("/jobs", status_code=202)
async def create(asked: Asked, idempotency_key: Annotated[str, Header()]) -> dict[str, Any]:
    """Make a job, or find the one of the same key."""
    if await awaited.exists(f"idempotency:{idempotency_key}"):
        return {"job_id": await awaited.get(f"idempotency:{idempotency_key}")}
    job_id = str(uuid.uuid4())
    await awaited.set(f"idempotency:{idempotency_key}", job_id)
    await awaited.set(f"job:{job_id}:status", "queued")
    await awaited.lpush("jobs", json.dumps({"id": job_id, "prompt": asked.prompt}))
    return {"job_id": job_id}


@app.get("/jobs/{job_id}")
async def look(job_id: str) -> dict[str, Any]:
    """A job's state and result."""
    return {"status": await awaited.get(f"job:{job_id}:status"), "result": await awaited.get(f"job:{job_id}:result")}


ask_with_backoff = retry(
    retry=retry_if_exception_type(openai.RateLimitError),
    wait=wait_random_exponential(min=1, max=60),
    stop=stop_after_attempt(6),
)(ask)


def work() -> None:
    """One worker thread."""
    while True:
        popped = r.brpop("jobs", timeout=2)  # less than the client's own timeout, which would raise
        if popped is None:
            continue
        job = json.loads(popped[1])
        r.set(f"job:{job['id']}:status", "processing")
        try:
            r.set(f"job:{job['id']}:result", ask_with_backoff(job["prompt"]))
            r.set(f"job:{job['id']}:status", "completed")
        except Exception as error:  # noqa: BLE001
            r.set(f"job:{job['id']}:error", str(error))
            r.set(f"job:{job['id']}:status", "failed")


def submitter(url: str) -> None:
    """A client of the API. States are read from Redis, so that asking for them is no load."""
    clients = threading.local()
    ids: set[str] = set()

    def submit(job: Job) -> None:
        if not hasattr(clients, "http"):
            clients.http = httpx2.Client(base_url=url, trust_env=False, timeout=30)
        reply = clients.http.post("/jobs", json={"prompt": job.prompt}, headers={"Idempotency-Key": job.key})
        ids.add(reply.raise_for_status().json()["job_id"])

    def ends() -> dict[str, int]:
        found = Counter(r.mget([f"job:{job_id}:status" for job_id in ids])) if ids else Counter()
        return {"completed": found["completed"], "failed": found["failed"]}

    serve(submit, ends)


def main() -> None:
    """A worker, or with the API's address the submitter."""
    if len(sys.argv) > 1:
        submitter(sys.argv[1])
        return
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
