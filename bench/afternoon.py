"""What one writes in an afternoon, to be compared with: a status row, a queue, Powertools' idempotency, and one message
for each invocation. Written as Powertools' documentation recommends (Idempotency, `idempotent_function` with DynamoDB).

It survives a doubled message and a failed call; it has no limits, no lanes, no telling, and a worker that dies after
the call was paid for calls again once the record's in-progress time is over.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from typing import Any

import boto3
import openai
from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)

from tests.integration.functions import Context


@dataclass
class Afternoon:
    """Both functions over their tables and their queue."""

    jobs: Any
    sqs: Any
    queue_url: str
    process: Any
    logger: Logger

    @classmethod
    def made(cls, base_url: str) -> Afternoon:
        """Tables and queue, inside an active `mock_aws`."""
        dynamodb, sqs = boto3.client("dynamodb"), boto3.client("sqs")
        for name, key in (("afternoon-jobs", "job_id"), ("afternoon-idempotency", "id")):
            dynamodb.create_table(
                TableName=name,
                KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
                AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
                BillingMode="PAY_PER_REQUEST",
            )
        url = sqs.create_queue(QueueName="afternoon")["QueueUrl"]
        jobs: Any = boto3.resource("dynamodb").Table("afternoon-jobs")
        provider = openai.OpenAI(base_url=base_url, api_key="sk", max_retries=2)
        config = IdempotencyConfig(event_key_jmespath="job_id")
        context: Any = Context()
        config.register_lambda_context(context)
        os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "afternoon-worker")  # a part of the records' keys

        @idempotent_function(  # type: ignore[untyped-decorator]
            data_keyword_argument="record",
            persistence_store=DynamoDBPersistenceLayer(table_name="afternoon-idempotency"),
            config=config,
        )
        def process(*, record: dict[str, Any]) -> dict[str, Any]:
            jobs.update_item(
                Key={"job_id": record["job_id"]},
                UpdateExpression="SET #status = :status",
                ExpressionAttributeNames={"#status": "status"},
                ExpressionAttributeValues={":status": "processing"},
            )
            reply = provider.responses.create(
                model="gpt-5.4-mini", input=record["prompt"], max_output_tokens=record["max_tokens"]
            )
            jobs.update_item(
                Key={"job_id": record["job_id"]},
                UpdateExpression="SET #status = :status, #result = :result",
                ExpressionAttributeNames={"#status": "status", "#result": "result"},
                ExpressionAttributeValues={":status": "completed", ":result": reply.output_text},
            )
            return {"text": reply.output_text}

        return cls(jobs, sqs, url, process, Logger(service="afternoon"))

    def post(self, number: int) -> None:
        """Accept a job: its row and its message."""
        job = {"job_id": str(uuid.uuid4()), "prompt": f"Name a river, {number}.", "max_tokens": 64}
        self.jobs.put_item(Item={**job, "status": "queued"}, ConditionExpression="attribute_not_exists(job_id)")
        self.sqs.send_message(QueueUrl=self.queue_url, MessageBody=json.dumps(job))
        self.logger.info("job_accepted", extra={"job_id": job["job_id"]})

    def work(self) -> None:
        """One invocation for one message."""
        for message in self.sqs.receive_message(QueueUrl=self.queue_url).get("Messages", []):
            record = json.loads(message["Body"])
            self.process(record=record)
            self.logger.info("job_completed", extra={"job_id": record["job_id"]})
            self.sqs.delete_message(QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"])
