"""Write template-gradual.yaml: the template with versions, an alias, and gradual shifts that alarms take back.

`python -m local.gradual`, then `sam build --template template-gradual.yaml`. Why it is a template of its own and
no parameter, docs/adr/0003-gradual-deployments.md says.

Each template written is a release of its own: by itself SAM publishes no new version when only a layer or a parameter
has changed, and the alias would go on leading to the old one. Our code is in a layer.
"""

import re
import uuid

from local.state import ROOT
from local.template import TEMPLATE

TARGET = ROOT / "template-gradual.yaml"
GRADUAL = ("ingest", "status", "slack", "worker", "notifier", "repair")
"""Functions that SAM's events lead to, so that they can lead to the alias. The others change at once."""
ROLLBACK_ALARMS = (
    "EndpointErrorsAlarm",
    "EndpointErrorRateAlarm",
    "IngestErrorsAlarm",
    "StatusErrorsAlarm",
    "SlackErrorsAlarm",
    "WorkerErrorsAlarm",
    "NotifierErrorsAlarm",
    "RepairErrorsAlarm",
)
"""Alarms that take a new version back. Not those of depth and age: a burst of jobs is no fault of the version."""
SHIFT = "Canary10Percent10Minutes"
_CODE = re.compile(rf"^      CodeUri: functions/({'|'.join(GRADUAL)})$", re.MULTILINE)


def gradual(text: str, release: str) -> str:
    """The template's text with what gradual deployments need. release: any letters and digits that are new."""
    alarms = ", ".join(f"!Ref {name}" for name in ROLLBACK_ALARMS)
    added = f"""
      AutoPublishAlias: live
      AutoPublishCodeSha256: "{release}"
      DeploymentPreference:
        Type: {SHIFT}
        Alarms: [{alarms}]"""
    changed, count = _CODE.subn(lambda found: found[0] + added, text)
    if count != len(GRADUAL):
        raise ValueError(f"{count} functions found in template.yaml, not {len(GRADUAL)}")
    return changed


def main() -> None:
    """Write the file."""
    text = gradual(TEMPLATE.read_text(), uuid.uuid4().hex)
    TARGET.write_text(f"# Made from template.yaml by `python -m local.gradual`, for one deployment.\n{text}")


if __name__ == "__main__":
    main()
