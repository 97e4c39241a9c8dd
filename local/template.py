"""Read the shipped template as data: what it declares is looked up, never repeated here."""

from typing import Any

import yaml

from local.state import ROOT

TEMPLATE = ROOT / "template.yaml"


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms (`!Ref`, `!Sub`), kept as {name: value}."""


def _short_form(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    return {suffix: value}


_Loader.add_multi_constructor("!", _short_form)


def load() -> dict[str, Any]:
    """The template, intrinsics unresolved."""
    content = yaml.load(TEMPLATE.read_text(), Loader=_Loader)  # noqa: S506 (a SafeLoader, and our own file)
    if not isinstance(content, dict):
        raise TypeError("template.yaml is not a mapping")
    return content


def resources(kind: str) -> dict[str, dict[str, Any]]:
    """Properties of all resources of one type, by logical id."""
    found = load()["Resources"].items()
    return {name: body.get("Properties", {}) for name, body in found if body.get("Type") == kind}


def parameter_defaults() -> dict[str, str]:
    """The template's parameters with their defaults; empty for one that has none."""
    return {name: str(body.get("Default", "")) for name, body in load().get("Parameters", {}).items()}
