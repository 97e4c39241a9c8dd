"""The Limits table's rows of clients: `limit_id` is `client#<client_id>`.

`requests` counts within the `minute` (whole minutes since the epoch), `tokens` and `micro_usd` within the `day`.
"""

from __future__ import annotations

from typing import Any, Final

from botocore.exceptions import ClientError

from backburner.adapters.aws import translated
from backburner.adapters.dynamodb import adding, job_of, updating
from backburner.errors import Busy, PortUnavailable
from backburner.models import Charge, ClientLimits, EpochMs, Job, Tally
from backburner.ports import Conflict, Guard, Moved, Patch

type Item = dict[str, Any]

KEPT_SECONDS: Final = 3 * 86_400
"""A tally is of no use after its day; the rest is for people who look."""
JOB, TALLY = 0, 1
"""Places in our transactions."""
_CONDITION_FAILED = "ConditionalCheckFailed"
_PASSING = frozenset({"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"})


def tally_of(item: Item) -> Tally:
    """The tally that a row describes."""
    numbers = {name: int(item[name]["N"]) for name in ("minute", "requests", "tokens", "micro_usd", "warned")}
    return Tally(day=item["day"]["S"], **numbers)


class TalliesTable:
    """Clients' rows and jobs' rows in one step, as ports.Tallies."""

    def __init__(self, client: Any, limits_table: str, jobs_table: str) -> None:
        self._client = client
        self._limits_table = limits_table
        self._jobs_table = jobs_table

    def read(self, client_id: str) -> Tally | None:
        """The client's tally as last written."""
        with translated():
            reply = self._client.get_item(TableName=self._limits_table, Key=_key(client_id), ConsistentRead=True)
        return tally_of(reply["Item"]) if "Item" in reply else None

    def admit(self, job: Job, now: EpochMs, before: Tally | None, after: Tally, limits: ClientLimits) -> Job | None:
        """Store a new job and count it, or return the job that stands there. Raises Moved, Busy."""
        reasons = self._transact(
            {"Put": adding(self._jobs_table, job, now)},
            {"Update": self._counting(job, now, before, after, limits)},
        )
        if _refused(reasons[JOB]):
            return job_of(reasons[JOB]["Item"])
        _raise_moved(reasons[TALLY])
        return None

    def settle(self, job: Job, guard: Guard, patch: Patch, change: Charge) -> None:
        """Write the patch and add the change to the tally. Raises Conflict, Moved, Busy."""
        update: Item = {
            "TableName": self._limits_table,
            "Key": _key(job.client_id),
            "ConditionExpression": "#day = :day AND tokens >= :tokens_min AND micro_usd >= :micro_usd_min",
            "UpdateExpression": "ADD tokens :tokens, micro_usd :micro_usd",
            "ExpressionAttributeNames": {"#day": "day"},
            "ExpressionAttributeValues": {
                ":day": {"S": change.day},
                ":tokens": _number(change.tokens),
                ":tokens_min": _number(-change.tokens),
                ":micro_usd": _number(change.micro_usd),
                ":micro_usd_min": _number(-change.micro_usd),
            },
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        reasons = self._transact({"Update": updating(self._jobs_table, job.job_id, guard, patch)}, {"Update": update})
        if _refused(reasons[JOB]):
            item = reasons[JOB].get("Item")
            raise Conflict(job_of(item) if item else None)
        _raise_moved(reasons[TALLY])

    def _counting(self, job: Job, now: EpochMs, before: Tally | None, after: Tally, limits: ClientLimits) -> Item:
        """One more job in the row: added where its minute and day go on, written anew where they have changed.

        The row may have grown since it was read, so each sum has its ceiling: what the limit leaves for this job.
        """
        charge = job.charge or Charge(after.day, 0, 0)
        sums = (
            ("minute", "requests", 1, limits.requests_per_minute),
            ("day", "tokens", charge.tokens, limits.tokens_per_day),
            ("day", "micro_usd", charge.micro_usd, limits.micro_usd_per_day),
        )
        sets = {
            "minute": _number(after.minute),
            "day": {"S": after.day},
            "expires_at": _number(now // 1000 + KEPT_SECONDS),
        }
        if before is None or (before.day, before.warned) != (after.day, after.warned):
            sets["warned"] = _number(after.warned)
        conditions, values, adds = ["attribute_not_exists(limit_id)"], {}, {}
        if before is not None:
            conditions = ["#minute = :old_minute", "#day = :old_day"]
            values = {":old_minute": _number(before.minute), ":old_day": {"S": before.day}}
        for window, name, step, limit in sums:
            if before is None or getattr(before, window) != getattr(after, window):
                sets[name] = _number(step)
                continue
            adds[name] = _number(step)
            if limit is not None:
                conditions.append(f"#{name} <= :{name}_max")
                values[f":{name}_max"] = _number(limit - step)
        given = sets | adds
        clauses = ["SET " + ", ".join(f"#{name} = :{name}" for name in sets)]
        clauses += ["ADD " + ", ".join(f"#{name} :{name}" for name in adds)] if adds else []
        return {
            "TableName": self._limits_table,
            "Key": _key(job.client_id),
            "ConditionExpression": " AND ".join(conditions),
            "UpdateExpression": " ".join(clauses),
            "ExpressionAttributeNames": {f"#{name}": name for name in given},
            "ExpressionAttributeValues": values | {f":{name}": value for name, value in given.items()},
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }

    def _transact(self, *items: Item) -> list[Item]:
        """Write all or nothing; for each item why nothing was written. botocore's own retries are safe: one token."""
        try:
            with translated():
                self._client.transact_write_items(TransactItems=list(items))
        except PortUnavailable as error:
            cause = error.__cause__
            response: Item = dict(cause.response) if isinstance(cause, ClientError) else {}
            reasons: list[Item] = response.get("CancellationReasons") or []
            codes = {reason["Code"] for reason in reasons}
            if _CONDITION_FAILED in codes:  # whatever else was the matter, trying again cannot help
                return reasons
            if codes & _PASSING or error.message == "TransactionInProgressException":
                raise Busy(error.message) from error
            raise
        return [{}, {}]


def _raise_moved(reason: Item) -> None:
    if _refused(reason):
        item = reason.get("Item")
        raise Moved(tally_of(item) if item else None)


def _refused(reason: Item) -> bool:
    return bool(reason.get("Code") == _CONDITION_FAILED)


def _key(client_id: str) -> Item:
    return {"limit_id": {"S": f"client#{client_id}"}}


def _number(value: int) -> Item:
    return {"N": str(value)}
