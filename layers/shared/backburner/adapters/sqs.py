"""The queues, and the formats of their messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cachetools import TTLCache

from backburner.adapters.aws import translated
from backburner.errors import BackburnerError, MalformedHint, MalformedTelling, PortUnavailable
from backburner.models import SCHEMA_VERSION, DeadLetter, Hint, Lane, Telling, canonical_json

BODY_CHARACTERS_MAX = 10_000
"""What is kept of a message that is no hint."""
DEPTH_SECONDS = 10
"""So long a depth once read is taken for the present one: it is approximate anyway, and a read is a round trip."""
PEEK_SECONDS = 5
"""Letters just looked at are out of the operator's sight for so long, and no longer."""

LOOK_SECONDS = 1
"""A receive that waits asks all of a queue's servers, one that does not only some: its "none" would mean little."""


def hint_body(hint: Hint) -> str:
    """A hint as a message body: `{"job_id":"…","v":1}`, plus `died` and `alone` where they say something."""
    fields: dict[str, object] = {"job_id": hint.job_id, "v": hint.schema_version}
    if hint.died is not None:
        fields["died"] = hint.died
    if hint.alone:
        fields["alone"] = True
    return canonical_json(fields)


def parse_hint(body: object) -> Hint:
    """The hint in a message body. Unknown fields are passed over, later versions refused. Raises MalformedHint."""
    fields = _fields(body, MalformedHint)
    died = fields.get("died")
    if type(died) not in (int, type(None)):
        raise MalformedHint
    return Hint(fields["job_id"], died=died, alone=fields.get("alone") is True, schema_version=fields["v"])


def _fields(body: object, malformed: type[BackburnerError]) -> dict[str, Any]:
    """The fields of a message body, with a job's id and a version that can be read. Raises `malformed`."""
    try:
        fields = json.loads(body) if isinstance(body, str) else None
    except (ValueError, RecursionError) as error:
        raise malformed from error
    if not isinstance(fields, dict):
        raise malformed
    job_id, version = fields.get("job_id"), fields.setdefault("v", SCHEMA_VERSION)
    if not isinstance(job_id, str) or not 0 < len(job_id) <= 128 or not job_id.isascii():
        raise malformed
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise malformed
    return fields


def telling_body(telling: Telling) -> str:
    """A telling as a message body: `{"job_id":"…","target":"webhook","tries":0,"v":1}`, and `claims` if it has them."""
    return canonical_json(
        {
            "job_id": telling.job_id,
            "target": telling.target,
            "tries": telling.tries,
            "v": telling.schema_version,
            **({} if telling.claims is None else {"claims": telling.claims}),
        }
    )


def parse_telling(body: object) -> Telling:
    """The telling in a message body. Unknown fields are passed over, later versions refused. Raises Malformed."""
    fields = _fields(body, MalformedTelling)
    target, tries, claims = fields.get("target"), fields.get("tries"), fields.get("claims")
    if not isinstance(target, str) or not 0 < len(target) <= 128 or type(tries) is not int:
        raise MalformedTelling
    if claims is not None and (type(claims) is not int or tries != 0):
        raise MalformedTelling
    return Telling(fields["job_id"], target, tries, claims, schema_version=fields["v"])


def batch_handler[T](
    parse: Callable[[object], T],
    run_batch: Callable[[Mapping[str, T], Callable[[], float]], list[str]],
    reject: Callable[[str, str], None] | None = None,
) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """A Lambda handler for batches of messages that answers each on its own (ReportBatchItemFailures).

    A message that `parse` calls malformed is rejected, once, with its body and the ARN of its queue; it comes back only
    if even that failed. Without `reject` it comes back until the queue's redrive policy takes it.
    """

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        messages: dict[str, T] = {}
        failed: list[str] = []
        for record in event.get("Records") or []:
            try:
                messages[record["messageId"]] = parse(record.get("body"))
            except (MalformedHint, MalformedTelling):
                try:
                    if reject is None:
                        raise PortUnavailable
                    reject(str(record.get("body") or ""), str(record.get("eventSourceARN") or ""))
                except PortUnavailable:
                    failed.append(record["messageId"])
        if messages:
            failed += run_batch(messages, lambda: context.get_remaining_time_in_millis() / 1000)
        return {"batchItemFailures": [{"itemIdentifier": name} for name in failed]}

    return handle


def lane_of(urls: Mapping[Lane, str], queue_arn: str) -> Lane:
    """The lane whose queue has this ARN; the standard one where a hint came from elsewhere."""
    name = queue_arn.rpartition(":")[2]  # URLs and ARNs both end in the queue's name
    return next((lane for lane, url in urls.items() if url.rpartition("/")[2] == name), Lane.STANDARD)


def _traced(trace: str | None) -> dict[str, Any]:
    """The system attribute in which SQS carries X-Ray's header to the consumer."""
    header = {"AWSTraceHeader": {"DataType": "String", "StringValue": trace}}
    return {} if trace is None else {"MessageSystemAttributes": header}


class LaneQueues:
    """The lane queues, as ports.HintQueue. `urls` names the deployed lanes."""

    def __init__(self, client: Any, urls: Mapping[Lane, str]) -> None:
        self._client = client
        self._urls = urls

    def send(self, hint: Hint, *, client_id: str, lane: Lane, delay_seconds: int = 0, trace: str | None = None) -> None:
        """Queue a hint. The client is the message group, so SQS's fair queues keep its backlog from the others."""
        with translated():
            self._client.send_message(
                QueueUrl=self._urls[lane],
                MessageBody=hint_body(hint),
                DelaySeconds=delay_seconds,
                MessageGroupId=client_id,
                **_traced(trace),
            )


class NoticesQueue:
    """The notifications queue, as ports.NoticeQueue."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url

    def send(self, telling: Telling, *, client_id: str, delay_seconds: int = 0, trace: str | None = None) -> None:
        """Queue a telling. The client is the message group: one whose receiver is slow does not hold up the others."""
        with translated():
            self._client.send_message(
                QueueUrl=self._url,
                MessageBody=telling_body(telling),
                DelaySeconds=delay_seconds,
                MessageGroupId=client_id,
                **_traced(trace),
            )


class LaneDepths:
    """The depth of the lane queues, as ports.Depths. For one thread."""

    def __init__(self, client: Any, urls: Mapping[Lane, str]) -> None:
        self._client = client
        self._urls = urls
        self._known: TTLCache[Lane, tuple[int, int] | None] = TTLCache(maxsize=len(Lane), ttl=DEPTH_SECONDS)

    def waiting(self, lane: Lane) -> int | None:
        """What SQS says, which is approximate; None, and for as long, where it could not be read."""
        counts = self._counts(lane)
        return counts[0] if counts else None

    def put_off(self, lane: Lane) -> int | None:
        """The same for delayed messages."""
        counts = self._counts(lane)
        return counts[1] if counts else None

    def _counts(self, lane: Lane) -> tuple[int, int] | None:
        if lane not in self._known:
            self._known[lane] = self._read(lane)
        return self._known[lane]

    def _read(self, lane: Lane) -> tuple[int, int] | None:
        ready, delayed = "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"
        try:
            with translated():
                reply = self._client.get_queue_attributes(QueueUrl=self._urls[lane], AttributeNames=[ready, delayed])
        except PortUnavailable:
            return None
        return int(reply["Attributes"][ready]), int(reply["Attributes"][delayed])


class DeadLetters:
    """The dead-letter queue, as ports.DeadLetterQueue."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url

    def bury(self, body: str | Hint, *, reason: str, detail: str, lane: Lane, client_id: str | None) -> None:
        """Send a letter; reason, detail, lane and client are message attributes, which the console shows."""
        texts = {"reason": reason, "detail": _allowed(detail)[:500], "lane": lane, "client_id": client_id}
        with translated():
            self._client.send_message(
                QueueUrl=self._url,
                MessageBody=hint_body(body)
                if isinstance(body, Hint)
                else _allowed(body or "(empty)")[:BODY_CHARACTERS_MAX],
                MessageAttributes={
                    name: {"DataType": "String", "StringValue": text} for name, text in texts.items() if text
                },
            )

    def look(self, limit: int) -> Sequence[DeadLetter]:
        """Some letters, at most that many; all stay in the queue."""
        found: dict[str, DeadLetter] = {}
        for _ in range(-(-limit // 10)):
            with translated():
                reply = self._client.receive_message(
                    QueueUrl=self._url,
                    MaxNumberOfMessages=10,
                    VisibilityTimeout=PEEK_SECONDS,
                    WaitTimeSeconds=0,
                    MessageAttributeNames=["reason"],
                    MessageSystemAttributeNames=["SentTimestamp"],
                )
            messages = reply.get("Messages", [])
            found.update((message["MessageId"], _letter(message)) for message in messages)
            if not messages:
                break
        return list(found.values())[:limit]

    def receive(self, seconds: int) -> Sequence[DeadLetter]:
        """Take up to ten letters into hand."""
        with translated():
            reply = self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=10,
                VisibilityTimeout=seconds,
                WaitTimeSeconds=LOOK_SECONDS,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["SentTimestamp"],
            )
        return [_letter(message) for message in reply.get("Messages", [])]

    def count(self) -> int:
        """What SQS says of messages that can be received, and of those that are hidden."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        with translated():
            reply = self._client.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)
        return sum(int(reply["Attributes"][name]) for name in names)

    def put_back(self, letters: Sequence[DeadLetter]) -> None:
        """Let others see letters again; one that cannot be put back comes back by itself."""
        for start in range(0, len(letters), 10):
            entries = [
                {"Id": str(index), "ReceiptHandle": letter.receipt, "VisibilityTimeout": 0}
                for index, letter in enumerate(letters[start : start + 10])
            ]
            with translated():
                self._client.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)

    def remove(self, letter: DeadLetter) -> None:
        """Delete a letter just received."""
        with translated():
            self._client.delete_message(QueueUrl=self._url, ReceiptHandle=letter.receipt)


def _letter(message: Mapping[str, Any]) -> DeadLetter:
    try:
        hint = parse_hint(message["Body"])
    except MalformedHint:
        hint = None
    texts = {name: value["StringValue"] for name, value in message.get("MessageAttributes", {}).items()}
    lane = texts.get("lane")
    return DeadLetter(
        message["ReceiptHandle"],
        message["Body"],
        texts.get("reason"),
        hint,
        name=message["MessageId"],
        detail=texts.get("detail", ""),
        lane=Lane(lane) if lane in set(Lane) else None,
        client_id=texts.get("client_id"),
        sent_at=int(message.get("Attributes", {}).get("SentTimestamp", 0)),
    )


def _allowed(text: str) -> str:
    """The text without the characters that SQS refuses: #x9 #xA #xD #x20-#xD7FF #xE000-#xFFFD #x10000-#x10FFFF."""
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c >= "\U00010000" else "?"
        for c in text
    )  # fmt: skip
