"""The shipped template as CloudFormation works with it: transformed by SAM, with all values filled in.

A rule is a plain function from such a template to a list of problems. Its tests apply it to `shipped()`, which must
have none, and to `shipped(put(...), drop(...))`, edited so that it has one: a rule that never bites proves nothing.
"""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cfnlint.decode import decode  # type: ignore[import-untyped]
from samtranslator.intrinsics.actions import FindInMapAction
from samtranslator.intrinsics.resolver import IntrinsicsResolver
from samtranslator.parser.parser import Parser
from samtranslator.translator.translator import Translator

type Template = dict[str, Any]
type Edit = Callable[[Template], None]

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "template.yaml"
REGION = "us-east-1"
PSEUDO_PARAMETERS = {
    "AWS::AccountId": "123456789012",
    "AWS::Partition": "aws",
    "AWS::Region": REGION,
    "AWS::StackName": "backburner",
    "AWS::URLSuffix": "amazonaws.com",
}

# ── From the file to values ───────────────────────────────────────────────────────────────────────────────────────────


@cache
def _text() -> str:
    template, errors = decode(str(PATH))
    if template is None or errors:
        raise ValueError(f"template.yaml cannot be read: {errors}")
    return json.dumps(template)


def source(*edits: Edit) -> Template:
    """The template as written, intrinsics in their long form, with the edits made."""
    template: Template = json.loads(_text())
    for edit in edits:
        edit(template)
    return template


def transformed(*edits: Edit, **parameters: Any) -> Template:
    """What SAM makes of it: CloudFormation, intrinsics unresolved."""
    template = source(*edits)
    for resource in template["Resources"].values():
        for name in ("CodeUri", "ContentUri"):  # SAM transforms packaged templates only
            if name in resource.get("Properties", {}):
                resource["Properties"][name] = f"s3://code/{resource['Properties'][name]}"
    # All that SAM asks of a session is its region; a real one would read the developer's AWS configuration.
    session: Any = SimpleNamespace(region_name=REGION)
    translator = Translator({}, Parser(), boto_session=session)
    cloudformation: Template = translator.translate(template, parameter_values=_as_given(template, parameters))
    return cloudformation


def shipped(*edits: Edit, **parameters: Any) -> Template:
    """The transformed template with parameters (their defaults, unless given) and mappings filled in.

    What a condition leaves out is gone. References to resources stay, in their long form.
    """
    template = transformed(*edits, **parameters)
    values = IntrinsicsResolver({**PSEUDO_PARAMETERS, **_defaults(template), **_as_given(template, parameters)})
    mappings = IntrinsicsResolver(template.get("Mappings", {}), {"Fn::FindInMap": FindInMapAction()})
    template = dict(mappings.resolve_parameter_refs(values.resolve_parameter_refs(template)))
    conditions = template.get("Conditions", {})
    for section in ("Resources", "Outputs"):
        kept = {name: body for name, body in template.get(section, {}).items() if _holds(body, conditions)}
        template[section] = {name: _chosen(body, conditions) for name, body in kept.items()}
    return template


def _as_given(template: Template, parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as SAM sees them: a number is text where the default is, as in what CloudFormation passes on."""
    defaults = _defaults(template)
    return {name: str(value) if isinstance(defaults.get(name), str) else value for name, value in parameters.items()}


def _defaults(template: Template) -> Template:
    return {name: body["Default"] for name, body in template.get("Parameters", {}).items() if "Default" in body}


def _holds(body: Template, conditions: Template) -> bool:
    return "Condition" not in body or _truth(conditions[body["Condition"]], conditions)


def _truth(condition: Any, conditions: Template) -> bool:
    match condition:
        case {"Fn::Equals": [left, right]}:
            return str(left) == str(right)
        case {"Fn::Contains": [list(known), sought]}:
            return str(sought) in known
        case {"Fn::Not": [inner]}:
            return not _truth(inner, conditions)
        case {"Fn::And": list(inner)}:
            return all(_truth(part, conditions) for part in inner)
        case {"Fn::Or": list(inner)}:
            return any(_truth(part, conditions) for part in inner)
        case {"Condition": name}:
            return _truth(conditions[name], conditions)
        case _:
            raise ValueError(f"no condition: {condition}")


def refusals(template: Template) -> list[str]:
    """What CloudFormation says of the parameters of a `shipped` template before it makes anything."""
    return [
        assertion["AssertDescription"]
        for rule in template.get("Rules", {}).values()
        if "RuleCondition" not in rule or _truth(rule["RuleCondition"], {})
        for assertion in rule["Assertions"]
        if not _truth(assertion["Assert"], {})
    ]


def _chosen(value: Any, conditions: Template) -> Any:
    """The value with each Fn::If replaced by its branch; a branch AWS::NoValue removes the property."""
    match value:
        case {"Fn::If": [name, yes, no]}:
            return _chosen(yes if _truth(conditions[name], conditions) else no, conditions)
        case dict():
            branches = {key: _chosen(inner, conditions) for key, inner in value.items()}
            return {key: inner for key, inner in branches.items() if inner != {"Ref": "AWS::NoValue"}}
        case list():
            return [item for item in (_chosen(i, conditions) for i in value) if item != {"Ref": "AWS::NoValue"}]
        case _:
            return value


def parameter_extremes(template: Template) -> Iterator[dict[str, Any]]:
    """Parameter values at the edge of what CloudFormation accepts, one parameter at a time; first the defaults."""
    yield {}
    for name, body in template["Parameters"].items():
        if "AllowedValues" in body:
            values = list(body["AllowedValues"])
        elif body["Type"] == "Number":
            values = [body[bound] for bound in ("MinValue", "MaxValue") if bound in body]
        else:
            values = [] if body.get("MinLength", 0) or "AllowedPattern" in body else [""]
        for value in values:
            yield {name: value}


# ── Edits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def put(path: str, value: Any) -> Edit:
    """Set what lies at a dotted path, such as `Mappings.Timeouts.Seconds.Worker`."""

    def edit(template: Template) -> None:
        parent, key = _at(template, path)
        parent[key] = deepcopy(value)

    return edit


def drop(path: str) -> Edit:
    """Remove what lies at a dotted path."""

    def edit(template: Template) -> None:
        parent, key = _at(template, path)
        del parent[key]

    return edit


def _at(template: Template, path: str) -> tuple[Any, Any]:
    *way, last = path.split(".")
    parent: Any = template
    for part in way:
        parent = parent[int(part)] if isinstance(parent, list) else parent.setdefault(part, {})
    return parent, int(last) if isinstance(parent, list) else last


# ── What rules ask ────────────────────────────────────────────────────────────────────────────────────────────────────


def of_type(template: Template, kind: str) -> dict[str, dict[str, Any]]:
    """Properties of all resources of a type, by logical id."""
    resources = template["Resources"].items()
    return {name: body.get("Properties", {}) for name, body in resources if body["Type"] == kind}


def functions(template: Template) -> dict[str, dict[str, Any]]:
    """Properties of the functions, by logical id."""
    return of_type(template, "AWS::Lambda::Function")


def referred(value: Any, attribute: str | None = None) -> str:
    """The logical id that `!Ref X` names, or with an attribute `!GetAtt X.attribute`; empty for anything else."""
    match value:
        case {"Ref": str(name)} if attribute is None:
            return name
        case {"Fn::GetAtt": [str(name), got]} if got == attribute:
            return name
        case _:
            return ""


def mentioned(value: Any) -> set[str]:
    """Logical ids of everything that a value refers to in any way."""
    match value:
        case {"Ref": str(name)}:
            return {name}
        case {"Fn::GetAtt": [str(name), *_]}:
            return {name}
        case {"Fn::Sub": str(text)}:
            return {name.split(".")[0] for name in re.findall(r"\$\{([^!}]+)\}", text)}
        case {"Fn::Sub": [str(text), dict(given)]}:
            return (mentioned({"Fn::Sub": text}) - given.keys()) | mentioned(list(given.values()))
        case dict():
            return set().union(*(mentioned(inner) for inner in value.values()))
        case list():
            return set().union(*(mentioned(inner) for inner in value))
        case _:
            return set()


def led_to(template: Template, value: Any) -> str:
    """The logical id of the function that a name or ARN means, whether or not through an alias; empty for none."""
    aliases = of_type(template, "AWS::Lambda::Alias")
    if (name := referred(value)) in aliases:
        return referred(aliases[name]["FunctionName"])
    return name or referred(value, "Arn")


@dataclass(frozen=True)
class QueueSource:
    """A queue that calls a function, by logical ids, and how."""

    name: str
    queue: str
    function: str
    properties: dict[str, Any]


def queue_sources(template: Template) -> list[QueueSource]:
    """All event source mappings from queues of the template."""
    mappings = of_type(template, "AWS::Lambda::EventSourceMapping").items()
    queues = of_type(template, "AWS::SQS::Queue")
    sources = [
        QueueSource(name, referred(body["EventSourceArn"], "Arn"), led_to(template, body["FunctionName"]), body)
        for name, body in mappings
    ]
    return [found for found in sources if found.queue in queues]


def dead_letter_queues(template: Template) -> set[str]:
    """Logical ids of the queues that a redrive policy moves messages to."""
    policies = [
        body["RedrivePolicy"] for body in of_type(template, "AWS::SQS::Queue").values() if "RedrivePolicy" in body
    ]
    return {referred(policy.get("deadLetterTargetArn"), "Arn") for policy in policies}


def environment(template: Template, function: str) -> dict[str, str]:
    """A function's variables; one that names a resource has the logical id as its value."""
    variables = functions(template)[function].get("Environment", {}).get("Variables", {}).items()
    return {name: min(mentioned(value), default=_plain(value)) for name, value in variables}


def _plain(value: Any) -> str:
    """A value that names no resource; of a Sub that nothing is left of, its text."""
    return str(value.get("Fn::Sub", "") if isinstance(value, dict) else value)


def code_folder(template: Template, function: str) -> Path:
    """The folder that a function's code comes from."""
    key: str = functions(template)[function]["Code"]["S3Key"]
    return ROOT / key
