"""A local stack that `local` has started for a bench: its API, its AWS, and the processes that run its functions."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import boto3
import httpx2
import psutil
from botocore.config import Config

from tests.fakes.emulated import function_processes

MODEL = "gpt-5.4-mini"
UNLIMITED = 10_000_000
DIMENSIONS = ("requests", "tokens", "input_tokens", "output_tokens")
AT_ONCE = 8
BUSY = {429, 503}
FUNCTIONS = ("IngestFunctionName", "WorkerFunctionName")
"""Those that every job needs."""


@dataclass(frozen=True)
class Stack:
    """A stack. `outputs` are the template's."""

    api_url: str
    api_key: str
    endpoint_url: str
    region: str
    outputs: Mapping[str, str]

    @classmethod
    def found(cls) -> Self:
        """The one whose file the environment names. Raises KeyError."""
        said = json.loads(Path(os.environ["BACKBURNER_STACK_FILE"]).read_text())
        return cls(**{name: said[name] for name in cls.__dataclass_fields__})

    def aws(self, service: str) -> Any:
        """A client with the operator's rights, that does not call twice what takes long."""
        factory: Any = boto3.client
        return factory(
            service,
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(read_timeout=120, retries={"total_max_attempts": 1}),
        )

    def table(self, output: str) -> Any:
        """The table that this output names."""
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        resource: Any = boto3.resource
        found = resource("dynamodb", endpoint_url=self.endpoint_url, region_name=self.region, **keys)
        return found.Table(self.outputs[output])

    def http(self, key: str | None = None) -> httpx2.Client:
        """A client of the API with the stack's key, or another."""
        headers = {"Authorization": f"Bearer {key or self.api_key}"}
        return httpx2.Client(base_url=self.api_url, headers=headers, timeout=60, trust_env=False)

    def submit(self, jobs: Sequence[tuple[str, str]], *, at_once: int = AT_ONCE, key: str | None = None) -> list[str]:
        """Have jobs accepted, of an idempotency key and a prompt each, so many at once; their ids."""
        with self.http(key) as http, ThreadPoolExecutor(max_workers=at_once) as pool:
            return list(pool.map(lambda job: _accepted(http, *job), jobs))

    def submit_new(self, count: int) -> list[str]:
        """Have so many jobs accepted that never were before; their ids."""
        return self.submit([(str(uuid.uuid4()), f"job {number}") for number in range(count)])

    def limit(self, **per_minute: int) -> None:
        """Set the model's limits, and forget what was learned of it; a dimension left out is unlimited."""
        item = {f"{name}_per_minute": {"N": str(per_minute.get(name, UNLIMITED))} for name in DIMENSIONS}
        self.aws("dynamodb").put_item(
            TableName=self.outputs["LimitsTableName"], Item={"limit_id": {"S": f"model#{MODEL}"}, **item}
        )

    def poll(self, **changes: Any) -> None:
        """Change the standard lane's poller: `batch` and `concurrency`, or `on`."""
        functions = self.aws("lambda")
        queue = self.outputs["StandardQueueUrl"].rpartition("/")[2]
        pollers = functions.list_event_source_mappings(FunctionName=self.outputs["WorkerFunctionName"])
        [poller] = [one for one in pollers["EventSourceMappings"] if one["EventSourceArn"].endswith(f":{queue}")]
        arguments: dict[str, Any] = {}
        if "on" in changes:
            arguments["Enabled"] = changes["on"]
        if "batch" in changes:
            arguments["BatchSize"] = changes["batch"]
            arguments["ScalingConfig"] = {"MaximumConcurrency": changes["concurrency"]}
        functions.update_event_source_mapping(UUID=poller["UUID"], **arguments)

    def processes(self, function: str) -> list[int]:
        """Those that run the function with this output's name."""
        return function_processes(self.outputs[function], f"STANDARD_QUEUE_URL={self.outputs['StandardQueueUrl']}")

    def workers(self) -> list[int]:
        """Those that run the worker."""
        return self.processes("WorkerFunctionName")

    def cpu_seconds(self) -> dict[str, float]:
        """What the processes of the functions that every job needs have used so far."""
        return {
            name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.processes(name)) for name in FUNCTIONS
        }


def _accepted(http: httpx2.Client, key: str, prompt: str) -> str:
    asked = {"prompt": prompt, "model": MODEL, "max_tokens": 60}
    while (reply := http.post("/jobs", json=asked, headers={"Idempotency-Key": key})).status_code in BUSY:
        time.sleep(0.2)
    return str(reply.raise_for_status().json()["job_id"])
