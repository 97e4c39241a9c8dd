"""What the emulator accepts in the template and then forgets or mistakes, put right after each deployment.

Nothing else belongs here: a deployment must get everything from the template. No resource is named; the template
says what is wanted, so that a new table or path needs no change here. Look again when the emulator's version changes.
"""

import re
from collections.abc import Iterator, Mapping

import boto3

from local import deployment, template
from local.emulator import CLIENT_CONFIG
from local.state import STACK_NAME


def reapply(session: boto3.Session, endpoint_url: str, physical_ids: Mapping[str, str]) -> None:
    """Everything that was dropped; harmless to repeat."""
    reapply_expiry(session, endpoint_url, physical_ids)
    reapply_any_methods(session, endpoint_url, physical_ids)
    reapply_concurrency(session, endpoint_url)
    reapply_environment(session, endpoint_url, physical_ids)
    make_composite_alarms(session, endpoint_url, physical_ids)


def reapply_expiry(session: boto3.Session, endpoint_url: str, physical_ids: Mapping[str, str]) -> None:
    """TimeToLiveSpecification of a table: dropped, though the API honours it and the emulator deletes by it."""
    dynamodb = session.client("dynamodb", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    for logical_id, properties in template.resources("AWS::DynamoDB::Table").items():
        expiry = properties.get("TimeToLiveSpecification")
        if expiry and logical_id in physical_ids:
            dynamodb.update_time_to_live(
                TableName=physical_ids[logical_id],
                TimeToLiveSpecification={"Enabled": expiry["Enabled"], "AttributeName": expiry["AttributeName"]},
            )


def reapply_any_methods(session: boto3.Session, endpoint_url: str, physical_ids: Mapping[str, str]) -> None:
    """Method ANY of a path of the REST API: the emulator's import knows single methods only."""
    gateway = session.client("apigateway", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    functions = session.client("lambda", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    for api, path, alias, function in _any_methods():
        arn = physical_ids.get(alias)
        if arn is None:
            arn = functions.get_function(FunctionName=physical_ids[function])["Configuration"]["FunctionArn"]
        api_id = physical_ids[api]
        pages = gateway.get_paginator("get_resources").paginate(restApiId=api_id)
        resource_id = next(item["id"] for page in pages for item in page["items"] if item["path"] == path)
        gateway.put_method(restApiId=api_id, resourceId=resource_id, httpMethod="ANY", authorizationType="NONE")
        gateway.put_integration(
            restApiId=api_id,
            resourceId=resource_id,
            httpMethod="ANY",
            type="AWS_PROXY",
            integrationHttpMethod="POST",
            uri=f"arn:aws:apigateway:{session.region_name}:lambda:path/2015-03-31/functions/{arn}/invocations",
        )


def _any_methods() -> Iterator[tuple[str, str, str, str]]:
    """API, path, alias and function of each path that takes any method."""
    for api, properties in template.resources("AWS::Serverless::Api").items():
        for path, methods in properties["DefinitionBody"]["paths"].items():
            if operation := methods.get("x-amazon-apigateway-any-method"):
                _, given = operation["x-amazon-apigateway-integration"]["uri"]["Sub"]
                _, alias, function = given["Function"]["If"]
                yield api, path, alias["Ref"], function["GetAtt"].removesuffix(".Arn")


def reapply_concurrency(session: boto3.Session, endpoint_url: str) -> None:
    """MaximumConcurrency of a queue's poller: a parameter's value stays text, and the poller fails on it."""
    functions = session.client("lambda", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    for mapping in functions.list_event_source_mappings()["EventSourceMappings"]:
        scaling = mapping.get("ScalingConfig")
        if scaling:  # the client library has already made a number of it
            functions.update_event_source_mapping(UUID=mapping["UUID"], ScalingConfig=scaling)


def reapply_environment(session: boto3.Session, endpoint_url: str, physical_ids: Mapping[str, str]) -> None:
    """Environment of a function: CloudFormation makes text of a number, the emulator cannot start the function.

    And an address of one of the template's APIs is that on AWS, not the emulator's.
    """
    functions = session.client("lambda", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    for logical_id in template.resources("AWS::Serverless::Function"):
        name = physical_ids[logical_id]
        configuration = functions.get_function_configuration(FunctionName=name)
        variables = configuration.get("Environment", {}).get("Variables", {})
        texts = {key: deployment.local_address(str(value), endpoint_url) for key, value in variables.items()}
        if texts != variables:
            functions.update_function_configuration(FunctionName=name, Environment={"Variables": texts})


def make_composite_alarms(session: boto3.Session, endpoint_url: str, physical_ids: Mapping[str, str]) -> None:
    """Composite alarms: unknown to CloudFormation here, so `local` leaves them out; the API has them."""
    cloudwatch = session.client("cloudwatch", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    sns = session.client("sns", endpoint_url=endpoint_url, config=CLIENT_CONFIG)
    topics = {topic["TopicArn"] for topic in sns.list_topics()["Topics"]} & set(physical_ids.values())
    for logical_id, properties in template.resources("AWS::CloudWatch::CompositeAlarm").items():
        rule = re.sub(r"\$\{(\w+)\}", lambda found: physical_ids[found[1]], properties["AlarmRule"]["Sub"])
        cloudwatch.put_composite_alarm(
            AlarmName=f"{STACK_NAME}-{logical_id}",
            AlarmDescription=properties["AlarmDescription"],
            AlarmRule=rule,
            AlarmActions=sorted(topics),
            OKActions=sorted(topics),
        )
