"""The handler that `bench.accept_cpu` measures ours against: the same two calls, and only what they need.

It knows no client, checks nothing, and logs nothing. Row and message have the attributes and the size that ours have.
"""

import json
import os
import time
import uuid
from typing import Any

import boto3
from botocore.config import Config

CONFIG = Config(
    connect_timeout=0.8,
    read_timeout=0.9,
    retries={"total_max_attempts": 2, "mode": "standard"},
    max_pool_connections=25,
)
dynamodb = boto3.client("dynamodb", config=CONFIG)
sqs = boto3.client("sqs", config=CONFIG)
table, queue = os.environ["JOBS_TABLE"], os.environ["STANDARD_QUEUE_URL"]


def handler(event: dict[str, Any], _context: Any) -> dict[str, Any]:
    """Take a job in."""
    body = json.loads(event["body"])
    job_id, now, trace = f"job_{uuid.uuid4().hex}", int(time.time() * 1000), os.environ["_X_AMZN_TRACE_ID"]
    item = {
        "job_id": {"S": job_id},
        "client_id": {"S": "alice"},
        "lane": {"S": "standard"},
        "status": {"S": "queued"},
        "fingerprint": {"S": "e38ff0ebbe6dde17ed77ba872d711772f6663ee323b1186b9ba76276fa398d9b"},
        "request": {"S": json.dumps({"max_tokens": body["max_tokens"], "prompt": body["prompt"]})},
        "owner": {"S": "igcpd4moz3i6fwaevmg2gcmwz6"},
        "created_at": {"N": str(now)},
        "available_at": {"N": str(now)},
        "deadline_at": {"N": str(now + 86_400_000)},
        "deadline_seconds": {"N": "86400"},
        "expires_at": {"N": str(now // 1000 + 1_296_000)},
        "due_at": {"N": str(now + 60_000)},
        "v": {"N": "1"},
        "claims": {"N": "0"},
        "attempts": {"N": "0"},
        "metadata": {"S": json.dumps(body["metadata"])},
        "ahead": {"N": "3"},
        "trail": {"S": json.dumps({"correlation_id": event["requestContext"]["requestId"], "trace": trace})},
        "due_shard": {"S": "1"},
    }
    dynamodb.put_item(
        TableName=table,
        Item=item,
        ConditionExpression="attribute_not_exists(job_id) OR expires_at <= :now",
        ExpressionAttributeValues={":now": {"N": str(now // 1000)}},
        ReturnValuesOnConditionCheckFailure="ALL_OLD",
    )
    sqs.send_message(
        QueueUrl=queue,
        MessageBody=json.dumps({"job_id": job_id, "v": 1}),
        DelaySeconds=0,
        MessageGroupId="alice",
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": trace}},
    )
    reply = {"job_id": job_id, "status": "queued", "poll_url": f"/jobs/{job_id}", "expires_at": now // 1000 + 1_296_000}
    headers = {"Content-Type": "application/json", "Location": f"jobs/{job_id}"}
    return {"statusCode": 202, "headers": headers, "body": json.dumps(reply)}
