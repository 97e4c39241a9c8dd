"""Alarms in the operators' Slack channel: what it means, the figure, and where the runbook says what to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from backburner.channels.slack_api import SlackApi
from backburner.errors import Untold
from backburner.ports import Journal
from backburner.slack_text import escaped_plainly

TEXT_CHARACTERS_MAX: Final = 500
"""Of a text from outside; each line is a section of its own, and with its escapes it fits into one."""
PATIENCE_SECONDS: Final = 40.0
"""What is put off is tried again for so long, within the function's minute: alarms come in bursts, Slack takes one
message a second in a channel, and a burst would use up both of Lambda's own further tries."""
SIGNS: Final[Mapping[str, str]] = {"ALARM": ":red_circle: *Alarm:*", "OK": ":large_green_circle: *Over:*"}
_DATAPOINT = re.compile(r"\[(-?[0-9][0-9.eE+-]*) \(")
_HEADING = re.compile(r"\s*Runbook: (?P<heading>[^.]+)\.?\s*$")
_REGION = re.compile(r"arn:[a-z-]+:cloudwatch:([a-z0-9-]+):")


@dataclass(frozen=True)
class SlackAlerts:
    """The function behind the alarm topic. `runbook_url` is the address of the runbook, or empty."""

    api: SlackApi
    channel: str
    runbook_url: str
    journal: Journal
    sleep: Callable[[float], None] = time.sleep

    def handle(self, event: Mapping[str, Any], _context: Any) -> dict[str, Any]:
        """Post each notification of an SNS event. Raises Untold for what another try may mend: Lambda makes two."""
        for record in event.get("Records") or []:
            message = str(record.get("Sns", {}).get("Message") or "")
            if is_birth(message):
                self.journal.note("alert_passed_over")
                continue
            text = alert_text(message, self.runbook_url)
            lines = [{"type": "section", "text": {"type": "mrkdwn", "text": line}} for line in text.split("\n")]
            try:
                self._post(text, lines)
                self.journal.note("alert_told")
            except Untold as error:
                self.journal.note("alert_untold", reason=error.message, again=error.again)
                if error.again:
                    raise
        return {}

    def _post(self, text: str, blocks: list[dict[str, Any]]) -> None:
        """Post, if need be when Slack says that it will take it. Raises Untold."""
        waited = 0.0
        while True:
            try:
                self.api.call("chat.postMessage", channel=self.channel, text=text, blocks=blocks, unfurl_links=False)
                return
            except Untold as error:
                pause = error.retry_after_seconds
                if not error.again or pause is None or waited + pause > PATIENCE_SECONDS:
                    raise
            self.sleep(pause)
            waited += pause


def is_birth(message: str) -> bool:
    """Whether it tells that all is well with an alarm that was just made: a deployment makes dozens of them.

    Each of ours takes missing data for good or bad, so it is never again without a state.
    """
    alarm = _alarm(message)
    return alarm is not None and (alarm.get("OldStateValue"), alarm.get("NewStateValue")) == ("INSUFFICIENT_DATA", "OK")


def _alarm(message: str) -> dict[str, Any] | None:
    """CloudWatch's notification; None if it is something else."""
    try:
        alarm = json.loads(message)
    except ValueError:
        return None
    return alarm if isinstance(alarm, dict) and "AlarmName" in alarm else None


def alert_text(message: str, runbook_url: str) -> str:
    """A CloudWatch alarm's notification as Slack's markup; any other message as it is."""
    alarm = _alarm(message)
    if alarm is None:
        return escaped_plainly(" ".join(message.split())[:TEXT_CHARACTERS_MAX]) or "(an empty notification)"
    said = str(alarm.get("AlarmDescription") or alarm["AlarmName"])
    heading = _HEADING.search(said)
    meaning = escaped_plainly(_HEADING.sub("", said)[:TEXT_CHARACTERS_MAX])
    state = str(alarm.get("NewStateValue"))
    lines = [f"{SIGNS.get(state, f'*{escaped_plainly(state)}:*')} {meaning}", _figure(alarm)]
    links = [_link(_runbook(runbook_url, heading["heading"] if heading else ""), "Runbook")] if runbook_url else []
    region = _REGION.match(str(alarm.get("AlarmArn") or ""))
    if region:
        console = f"https://{region[1]}.console.aws.amazon.com/cloudwatch/home?region={region[1]}#alarmsV2:alarm/"
        links.append(_link(console + quote(str(alarm["AlarmName"]), safe=""), "CloudWatch"))
    return "\n".join(line for line in (*lines, " · ".join(links)) if line)


def _figure(alarm: Mapping[str, Any]) -> str:
    """The latest datapoint beside its threshold, or CloudWatch's own reason."""
    reason = str(alarm.get("NewStateReason") or "")
    trigger = alarm.get("Trigger") if isinstance(alarm.get("Trigger"), dict) else {}
    point = _DATAPOINT.search(reason)
    if not point or not trigger or "Threshold" not in trigger:
        return escaped_plainly(reason[:TEXT_CHARACTERS_MAX])
    metric = escaped_plainly(str(trigger.get("MetricName") or "The figure")[:200])
    return f"{metric} is *{_number(point[1])}*; the threshold is {_number(trigger['Threshold'])}."


def _number(value: Any) -> str:
    try:
        return f"{float(value):,.12g}"
    except (TypeError, ValueError, OverflowError):
        return escaped_plainly(str(value)[:50])


def _runbook(url: str, heading: str) -> str:
    """The address of a heading, as GitHub makes anchors: lower case, hyphens for spaces, no punctuation."""
    anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    return f"{url}#{anchor}" if anchor else url


def _link(url: str, label: str) -> str:
    return f"<{url.replace('|', '%7C').replace('>', '%3E')}|{label}>"
