"""What the integration tests stand on is what the template declares."""

from __future__ import annotations

import json
from typing import Any

import boto3

from tests.integration.deployed import FUNCTION, Deployed, resources, template


def _found(deployed: Deployed, name: str) -> dict[str, Any]:
    client: Any = boto3.client("sqs")
    reply = client.get_queue_attributes(QueueUrl=deployed.names[name], AttributeNames=["All"])
    attributes: dict[str, Any] = reply["Attributes"]
    return attributes


def test_the_tables_have_the_templates_keys_and_indexes(deployed: Deployed) -> None:
    """Key schema, indexes and TTL are read back as declared."""
    client = boto3.client("dynamodb")
    for name, body in resources("AWS::DynamoDB::Table").items():
        declared = body["Properties"]
        table = client.describe_table(TableName=deployed.names[name])["Table"]
        assert table["KeySchema"] == declared["KeySchema"]
        indexes = {
            index["IndexName"]: (index["KeySchema"], index["Projection"])
            for index in table.get("GlobalSecondaryIndexes", [])
        }
        assert indexes == {
            index["IndexName"]: (index["KeySchema"], index["Projection"])
            for index in declared.get("GlobalSecondaryIndexes", [])
        }
        ttl = client.describe_time_to_live(TableName=deployed.names[name])["TimeToLiveDescription"]
        wanted = declared.get("TimeToLiveSpecification", {})
        assert ttl.get("AttributeName") == wanted.get("AttributeName")
        assert (ttl["TimeToLiveStatus"] == "ENABLED") is bool(wanted.get("Enabled"))


def test_the_queues_have_the_templates_redrive_policy_and_times(deployed: Deployed) -> None:
    """Every lane's dead letters go to the dead-letter queue after as many receives as the template says."""
    seconds = template()["Mappings"]["Timeouts"]["Seconds"]
    dead = _found(deployed, "DeadLetterQueue")
    for name in ("InteractiveQueue", "StandardQueue", "BulkQueue"):
        lane = _found(deployed, name)
        redrive = json.loads(lane["RedrivePolicy"])
        declared = resources("AWS::SQS::Queue")[name]["Properties"]["RedrivePolicy"]
        assert redrive == {"deadLetterTargetArn": dead["QueueArn"], "maxReceiveCount": declared["maxReceiveCount"]}
        assert lane["VisibilityTimeout"] == str(seconds["Visibility"])
        assert lane["MessageRetentionPeriod"] == str(seconds["LaneRetention"])
    assert dead["MessageRetentionPeriod"] == str(seconds["DeadLetterRetention"])


def test_every_function_has_its_environment_resolved(deployed: Deployed) -> None:
    """No intrinsic is left, and each function of the template is there."""
    assert set(deployed.environments) == set(resources(FUNCTION))
    for environment in deployed.environments.values():
        assert environment["JOBS_TABLE"] == deployed.names["JobsTable"]
        assert all(isinstance(value, str) for value in environment.values())
    assert deployed.environments["WorkerFunction"]["PROVIDER_SECRET_ARN"] == deployed.names["ProviderSecret"]
