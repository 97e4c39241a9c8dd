"""Storage: nothing is lost with the stack, nothing is readable by others, and everything goes when its time is over."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from backburner.adapters.dynamodb import CLIENT_INDEX, DUE_INDEX, WAITING_INDEX, JobsTable
from tests.fakes.house import House
from tests.template.resolved import Edit, Template, drop, mentioned, of_type, put, shipped, source

TABLE, BUCKET = "AWS::DynamoDB::Table", "AWS::S3::Bucket"
EXPIRING = ("JobsTable", "LimitsTable", "ConnectionsTable")
"""Tables whose rows end by themselves."""
KEYS = {
    "JobsTable": {
        "": ["job_id"],
        DUE_INDEX: ["due_shard", "due_at"],
        CLIENT_INDEX: ["client_id", "created_at"],
        WAITING_INDEX: ["lane", "waiting_since"],
    },
    "ClientsTable": {"": ["key_hash"]},
    "LimitsTable": {"": ["limit_id"]},
    "ConnectionsTable": {"": ["pk", "sk"]},
}
"""What the adapters look rows up by: in the table itself ("") and in its indexes."""
DAY = 86_400
DEAD_LETTER_DAYS, DEADLINE_DAYS = 14, 7
PHYSICAL_NAMES = {
    "AlarmName", "ApiKeyName", "BucketName", "DashboardName", "FunctionName", "LogGroupName", "ManagedPolicyName",
    "QueueName", "RoleName", "TableName", "TopicName",
}  # fmt: skip
NAMED_BY_NAME = {"AWS::SecretsManager::Secret", "AWS::Events::Rule", "AWS::Scheduler::Schedule", "AWS::Pipes::Pipe"}
"""Types whose physical name is the property `Name`."""

# ── Rules ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kept(template: Template) -> list[str]:
    """Tables and buckets stay when the stack goes, or when an update replaces them."""
    return [
        f"{name}: {policy} is not Retain"
        for name, body in template["Resources"].items()
        if body["Type"] in (TABLE, BUCKET)
        for policy in ("DeletionPolicy", "UpdateReplacePolicy")
        if body.get(policy) != "Retain"
    ]


def tables(template: Template) -> list[str]:
    """Every table is billed on demand, encrypted, and can be put back to any second of the last weeks."""
    wanted = {
        "BillingMode": "PAY_PER_REQUEST",
        "SSESpecification": {"SSEEnabled": True},
        "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True},
    }
    return [
        f"{name}: {prop} is not {value}"
        for name, body in of_type(template, TABLE).items()
        for prop, value in wanted.items()
        if body.get(prop) != value
    ]


def buckets(template: Template) -> list[str]:
    """Every bucket is encrypted and public in no way."""
    blocks = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    problems = []
    for name, body in of_type(template, BUCKET).items():
        access = body.get("PublicAccessBlockConfiguration", {})
        problems += [f"{name}: {block} is off" for block in blocks if access.get(block) is not True]
        problems += (
            [] if body.get("BucketEncryption", {}).get("ServerSideEncryptionConfiguration") else [f"{name}: plain"]
        )
    return problems


def payloads(template: Template, retention_days: int) -> list[str]:
    """Objects go by themselves, but after every row and dead letter that may point at them, and not for ever."""
    wanted = max(DEAD_LETTER_DAYS + DEADLINE_DAYS, retention_days + DEADLINE_DAYS) + 1
    problems = []
    for name, body in of_type(template, BUCKET).items():
        rules = body.get("LifecycleConfiguration", {}).get("Rules", [])
        whole = [r for r in rules if r.get("Status") == "Enabled" and not r.keys() & {"Prefix", "TagFilters", "Filter"}]
        if not any("ExpirationInDays" in rule for rule in whole):
            problems.append(f"{name}: some objects stay for ever")
        problems += [
            f"{name}: objects go after {rule['ExpirationInDays']} days, {wanted} are needed"
            for rule in rules
            if "ExpirationInDays" in rule and rule["ExpirationInDays"] < wanted
        ]
    return problems


def expiry(template: Template) -> list[str]:
    """DynamoDB deletes what the code says has expired: TTL is on, and watches the number that the adapter writes."""
    problems = []
    for name in EXPIRING:
        spec = of_type(template, TABLE)[name].get("TimeToLiveSpecification", {})
        written = written_row().get(spec.get("AttributeName", ""), {})
        if spec.get("Enabled") is not True:
            problems.append(f"{name}: no TTL")
        elif set(written) != {"N"}:
            problems.append(f"{name}: TTL watches {spec.get('AttributeName')!r}, written as {written}")
        elif not 0 < int(written["N"]) - House().clock.now() // 1000 < 400 * DAY:
            problems.append(f"{name}: {spec['AttributeName']} is no time in seconds")
    return problems


def keys(template: Template) -> list[str]:
    """Each table and index has the key that the adapter asks by, with the types that it writes."""
    problems = []
    row = written_row()
    for table, wanted in KEYS.items():
        body = of_type(template, TABLE)[table]
        indexes = {index["IndexName"]: index for index in body.get("GlobalSecondaryIndexes", [])}
        declared = {"": _key(body)} | {name: _key(index) for name, index in indexes.items()}
        problems += [] if declared == wanted else [f"{table}: keys are {declared}, the adapter asks by {wanted}"]
        problems += [
            f"{table}: {a['AttributeName']} is not written as {a['AttributeType']}"
            for a in body["AttributeDefinitions"]
            if table == "JobsTable" and set(row.get(a["AttributeName"], {})) != {a["AttributeType"]}
        ]
    return problems


def names(template: Template) -> list[str]:
    """Nothing has a fixed physical name: two stacks live in one account, and a replacement finds its name free."""
    return [
        f"{name}: {prop}"
        for name, body in template["Resources"].items()
        for prop, value in body.get("Properties", {}).items()
        if prop in PHYSICAL_NAMES or (prop == "Name" and body["Type"] in NAMED_BY_NAME)
        if not mentioned(value)  # else it names another resource, as a permission names its function
    ]


def _key(body: Mapping[str, Any]) -> list[str]:
    order = sorted(body.get("KeySchema", []), key=lambda entry: str(entry["KeyType"]))  # HASH before RANGE
    return [entry["AttributeName"] for entry in order]


def written_row() -> dict[str, dict[str, Any]]:
    """The row of a job that waits as the adapter sends it to DynamoDB."""
    client, house = MagicMock(), House()
    JobsTable(client, "table").add(replace(house.accept(), waiting_since=1), house.clock.now())
    row: dict[str, dict[str, Any]] = client.put_item.call_args.kwargs["Item"]
    return row


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", [kept, tables, buckets, keys, names])
def test_the_shipped_storage_is_safe(rule: Any) -> None:
    """The template as shipped keeps every rule."""
    assert rule(shipped()) == []


def test_res_04_ttl_watches_what_the_adapter_writes() -> None:
    """RES-04: the row of a job carries its expiry as a whole number of seconds, in the attribute that TTL watches."""
    assert expiry(shipped()) == []


@pytest.mark.parametrize("days", source()["Parameters"]["RetentionDays"]["AllowedValues"])
def test_payloads_outlive_their_rows(days: str) -> None:
    """For every retention that may be chosen, no row points at an object that is gone."""
    assert payloads(shipped(RetentionDays=days), int(days)) == []


JOBS, CLIENTS, PAYLOADS = "Resources.JobsTable", "Resources.ClientsTable", "Resources.PayloadsBucket.Properties"
LIFECYCLE = f"{PAYLOADS}.LifecycleConfiguration.Rules.0"
TTL = f"{JOBS}.Properties.TimeToLiveSpecification"


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        (kept, drop(f"{JOBS}.DeletionPolicy")),
        (kept, put(f"{CLIENTS}.UpdateReplacePolicy", "Delete")),
        (kept, put("Resources.PayloadsBucket.DeletionPolicy", "Snapshot")),
        (tables, put(f"{JOBS}.Properties.BillingMode", "PROVISIONED")),
        (tables, drop(f"{JOBS}.Properties.BillingMode")),
        (tables, drop(f"{CLIENTS}.Properties.SSESpecification")),
        (tables, put(f"{JOBS}.Properties.PointInTimeRecoverySpecification.PointInTimeRecoveryEnabled", False)),
        (buckets, put(f"{PAYLOADS}.PublicAccessBlockConfiguration.RestrictPublicBuckets", False)),
        (buckets, drop(f"{PAYLOADS}.PublicAccessBlockConfiguration")),
        (buckets, drop(f"{PAYLOADS}.BucketEncryption")),
        (keys, put(f"{JOBS}.Properties.GlobalSecondaryIndexes.0.IndexName", "by_due")),
        (keys, drop(f"{JOBS}.Properties.GlobalSecondaryIndexes.1")),
        (keys, put(f"{JOBS}.Properties.GlobalSecondaryIndexes.0.KeySchema.1.AttributeName", "created_at")),
        (keys, put(f"{JOBS}.Properties.AttributeDefinitions.2.AttributeType", "S")),
        (keys, put(f"{CLIENTS}.Properties.KeySchema.0.AttributeName", "client_id")),
        (names, put(f"{JOBS}.Properties.TableName", "jobs")),
        (names, put(f"{JOBS}.Properties.TableName", {"Fn::Sub": "${AWS::StackName}-jobs"})),
        (names, put("Resources.WorkerFunction.Properties.FunctionName", "worker")),
        (names, put("Resources.ProviderSecret.Properties.Name", "keys")),
        (names, put("Resources.WorkerLogs.Properties.LogGroupName", "/aws/lambda/worker")),
    ],
)
def test_unsafe_storage_is_found(rule: Any, edit: Edit) -> None:
    """Each way of losing, exposing or misnaming stored data is a problem to its rule."""
    assert rule(shipped(edit)) != []


@pytest.mark.parametrize(
    "edit",
    [
        put(f"{TTL}.Enabled", False),
        drop(TTL),
        put(f"{TTL}.AttributeName", "ttl"),
        put(f"{TTL}.AttributeName", "created_at"),
        put(f"{TTL}.AttributeName", "status"),
    ],
    ids=["disabled", "none", "never-written", "milliseconds", "a-text"],
)
def test_res_04_a_ttl_that_never_deletes_is_found(edit: Edit) -> None:
    """RES-04: a TTL that is off, or watches milliseconds, a text or nothing, is a problem."""
    assert expiry(shipped(edit)) != []


@pytest.mark.parametrize(
    "edit",
    [
        put("Mappings.Payloads.14.Days", 21),
        put(f"{LIFECYCLE}.Status", "Disabled"),
        put(f"{LIFECYCLE}.Prefix", "results/"),
        drop(f"{LIFECYCLE}.ExpirationInDays"),
        drop(f"{PAYLOADS}.LifecycleConfiguration"),
    ],
    ids=["too-early", "disabled", "some-only", "no-days", "none"],
)
def test_payloads_that_go_too_early_or_never_are_found(edit: Edit) -> None:
    """Objects that go before their rows, or stay when those are gone, are a problem."""
    assert payloads(shipped(edit), 14) != []


@pytest.mark.parametrize(("days", "too_few"), [("30", 37), ("365", 372)])
def test_a_mapping_that_lags_behind_a_long_retention_is_found(days: str, too_few: int) -> None:
    """The longest deadline comes before the retention starts."""
    edit = put(f"Mappings.Payloads.{days}.Days", too_few)
    assert payloads(shipped(edit, RetentionDays=days), int(days)) != []
