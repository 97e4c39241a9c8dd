"""The simulator's teeth: the program broken on purpose, one way at a time. Every break must be caught.

python -m tests.simulation.mutants [--seeds N]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "layers" / "shared" / "backburner"


@dataclass(frozen=True)
class Mutant:
    """One break: in `file`, `old` (which must stand there once) becomes `new`; `also` where two guards watch over it."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str, str], ...] = ()


MUTANTS = (
    Mutant(
        "drop the fence: finish whoever claimed since",
        "lifecycle.py",
        "            Guard(_UNFINISHED, claims=job.claims),\n            JobStatus.COMPLETED,",
        "            Guard(_UNFINISHED),\n            JobStatus.COMPLETED,",
    ),
    Mutant(
        "finish unconditionally, also over a final status",
        "lifecycle.py",
        "            Guard(_UNFINISHED, claims=job.claims),\n            JobStatus.COMPLETED,",
        "            Guard(_UNFINISHED | _FINAL),\n            JobStatus.COMPLETED,",
    ),
    Mutant(
        "ignore the lease: take over whatever is in processing",
        "lifecycle.py",
        "replace(_lapsed(job, now), deadline_after=now, unexpired_at=now)",
        "Guard(_PROCESSING, claims=job.claims, deadline_after=now, unexpired_at=now)",
        also=(
            (
                "execution.py",
                "case JobStatus.PROCESSING if lapses_at(row) <= now:",
                "case JobStatus.PROCESSING:",
            ),
        ),
    ),
    Mutant(
        "claim final and running jobs",
        "lifecycle.py",
        "startable = Guard(_QUEUED, available_by=now, deadline_after=now, unexpired_at=now)",
        "startable = Guard(_QUEUED | _PROCESSING | _FINAL, deadline_after=now, unexpired_at=now)",
    ),
    Mutant(
        "start before the provider's retry-after",
        "lifecycle.py",
        "Guard(_QUEUED, available_by=now, deadline_after=now, unexpired_at=now)",
        "Guard(_QUEUED, deadline_after=now, unexpired_at=now)",
    ),
    Mutant(
        "start after the deadline",
        "lifecycle.py",
        "Guard(_QUEUED, available_by=now, deadline_after=now, unexpired_at=now)",
        "Guard(_QUEUED, available_by=now, unexpired_at=now)",
    ),
    Mutant(
        "hint before row",
        "submission.py",
        "            return new, self.store.add(new, self.clock.now()), ()\n",
        "            self.lifecycle.remind(new)\n            return new, self.store.add(new, self.clock.now()), ()\n",
    ),
    Mutant(
        "count attempts only on clean failure",
        "lifecycle.py",
        '            "add_claims": 1,\n            "add_attempts": 1,\n',
        '            "add_claims": 1,\n',
    ),
    Mutant(
        "no repair of queued jobs",
        "repair.py",
        "            else:\n                self.lifecycle.resend(job)",
        "            else:\n                pass",
    ),
    Mutant(
        "no repair of lost workers",
        "repair.py",
        "            self.lifecycle.lose(job) if lapsed else",
        "            None if lapsed else",
    ),
    Mutant(
        "no repair of untold targets",
        "repair.py",
        "            self.lifecycle.reannounce(job)",
        "            pass",
    ),
    Mutant(
        "put a job back though its lease is alive",
        "repair.py",
        "self.lifecycle.lose(job) if lapsed else self.lifecycle.remind(job, alone=True)",
        "self.lifecycle.lose(job)",
        also=(
            (
                "lifecycle.py",
                "ours = Guard(_PROCESSING, claims=job.claims) if lapsed_by is None else _lapsed(job, lapsed_by)",
                "ours = Guard(_PROCESSING, claims=job.claims)",
            ),
        ),
    ),
    Mutant(
        "run for ever: no bound on attempts after a lost worker",
        "lifecycle.py",
        "        if not self.is_lost_for_good(job):\n            more",
        "        if now < job.deadline_at:\n            more",
    ),
    Mutant(
        "run for ever: no bound on retries",
        "lifecycle.py",
        "if not error.retryable or not self.may_try_again(job) or available_at >= job.deadline_at:",
        "if not error.retryable or available_at >= job.deadline_at:",
    ),
    Mutant(
        "waiting for the provider's limit uses up attempts",
        "lifecycle.py",
        'more: Patch = {"add_attempts": -1, "slot": slot, "place": place, "parked_since": since}',
        'more: Patch = {"slot": slot, "place": place, "parked_since": since}',
    ),
    Mutant(
        "a call refused for its rate is called again at once",
        "limits.py",
        "            self._revise(model, lambda gauge: _held(gauge, now, now + hold_ms))",
        "            pass",
    ),
    Mutant(
        "revive a dead job for any straggler",
        "execution.py",
        "case JobStatus.FAILED if hint.died is not None and hint.died == row.claims:",
        "case JobStatus.FAILED:",
    ),
    Mutant(
        "revive what was discarded",
        "lifecycle.py",
        "Guard(_FAILED, claims=job.claims, unexpired_at=now, undiscarded=True)",
        "Guard(_FAILED, claims=job.claims, unexpired_at=now)",
    ),
    Mutant(
        "requeue without a new claim count",
        "lifecycle.py",
        '            "add_claims": 1,\n        }',
        "        }",
    ),
    Mutant(
        "requeue without a hint, and without being due",
        "lifecycle.py",
        '            "due_at": now + min(PATIENCE_MS, job.deadline_seconds * 1000),',
        '            "due_at": None,',
    ),
    Mutant(
        "sweep letters of dead jobs",
        "redrive.py",
        "(job.status, job.claims) != (JobStatus.FAILED, hint.died)",
        "job.status is JobStatus.FAILED",
    ),
    Mutant(
        "begin a call anew that goes on at the provider",
        "execution.py",
        "background=Background(lease.handle, partial",
        "background=Background(None, partial",
    ),
    Mutant(
        "wait for a call before its name is noted",
        "lifecycle.py",
        "        self.store.update(job.job_id, Guard(_PROCESSING, claims=job.claims), handle=handle)",
        "        pass",
    ),
    Mutant(
        "forget the dead letter",
        "lifecycle.py",
        "((DEAD_LETTER,) if dead else ()) + job.targets",
        "job.targets",
    ),
    Mutant(
        "forget the targets of the end",
        "lifecycle.py",
        "((DEAD_LETTER,) if dead else ()) + job.targets",
        "((DEAD_LETTER,) if dead else ())",
    ),
    Mutant(
        "tell without a lease on the telling",
        "delivery.py",
        "            if notice.lease_until > now:",
        "            if False:",
    ),
    Mutant(
        "tell without noting it",
        "delivery.py",
        "            self._write(job, told, read=read)",
        "            pass",
    ),
    Mutant(
        "leave a job in hand due in an hour",
        "lifecycle.py",
        "return self.store.update(job_id, replace(startable, due_after=lapse, due_by=soon), **taken)",
        "return self.store.update(job_id, startable, **taken)",
    ),
    Mutant(
        "leave a job in hand due before its lease ends",
        "lifecycle.py",
        "        if due_at is None or due_at < now + LEASE_MS:",
        "        if due_at is None:",
    ),
    Mutant(
        "do not renew leases",
        "execution.py",
        "                row = self._lifecycle.renew(lease.job, lease.due_at)\n",
        "                row = lease.job\n",
    ),
    Mutant(
        "cancel over a final status",
        "lifecycle.py",
        "return self._end(job, Guard(_UNFINISHED), JobStatus.CANCELLED, patient=False)",
        "return self._end(job, Guard(_UNFINISHED | _FINAL), JobStatus.CANCELLED, patient=False)",
    ),
    Mutant(
        "leave the policy's dead letters unexplained",
        "repair.py",
        "            if letter.reason is not None:",
        "            if letter.reason is not None or letter.hint is not None:",
    ),
    Mutant(
        "wait beyond what SQS can delay",
        "lifecycle.py",
        "delay_seconds = min(-(-wait_ms // 1000), DELAY_SECONDS_MAX)",
        "delay_seconds = -(-wait_ms // 1000)",
    ),
    Mutant(
        "a queued row that nobody need look at",
        "lifecycle.py",
        '            "due_at": min(available_at + PATIENCE_MS, job.deadline_at),',
        '            "due_at": None,',
    ),
    Mutant(
        "forget who began to follow the job while it was worked on",
        "lifecycle.py",
        "replace(guard, targets=job.targets),",
        "guard,",
    ),
    Mutant(
        "discard the paid answer when its lease has lapsed",
        "lifecycle.py",
        "            Guard(_UNFINISHED, claims=job.claims),\n            JobStatus.COMPLETED,",
        "            Guard(_PROCESSING, claims=job.claims, due_at=job.due_at),\n            JobStatus.COMPLETED,",
    ),
    Mutant(
        "settle a charge without asking whether somebody has",
        "lifecycle.py",
        "self.tallies.settle(current, _as_read(current), {",
        "self.tallies.settle(current, Guard(_FINAL), {",
    ),
    Mutant(
        "settle a charge apart from its row",
        "lifecycle.py",
        '{**patch, "charge": spent}, change)',
        "patch, change)",
    ),
    Mutant(
        "give nothing back when a job ends",
        "lifecycle.py",
        " + ((BUDGET,) if job.charge is not None else ())",
        "",
    ),
    Mutant(
        "forget what an answer cost that came too late",
        "lifecycle.py",
        "            if job.charge is None:\n                self.store.update",
        "            if True:\n                self.store.update",
    ),
    Mutant(
        "charge a redriven job with its first run again",
        "lifecycle.py",
        "return Charge(day_of(now), 0, 0, since=len(job.log))",
        "return Charge(day_of(now), job.charge.tokens, job.charge.micro_usd)",
    ),
)


def broken(mutant: Mutant, package: Path) -> dict[str, str]:
    """The files that the mutant breaks, by name, as they are then. Raises ValueError if what it quotes is not there."""
    files: dict[str, str] = {}
    for name, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.also):
        text = files.get(name) or (package / name).read_text()
        if text.count(old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: its text stands {text.count(old)} times in {name}")
        files[name] = text.replace(old, new)
    return files


def caught(mutant: Mutant, seeds: int) -> str | None:
    """The last line of what the simulator says of the mutant; None if it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "backburner"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in broken(mutant, copy).items():
            (copy / name).write_text(text)
        run = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seeds", str(seeds), "--quiet"],
            cwd=ROOT,
            env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if run.returncode == 0:
        return None
    lines = (run.stdout + run.stderr).strip().splitlines()
    return lines[-1] if lines else "(no word)"


def main() -> int:
    """Print the list and its outcome; 1 if a mutant survived."""
    seeds = int(sys.argv[sys.argv.index("--seeds") + 1]) if "--seeds" in sys.argv else 4_000
    with ThreadPoolExecutor(max_workers=2) as pool:
        verdicts = list(pool.map(lambda mutant: caught(mutant, seeds), MUTANTS))
    for mutant, verdict in zip(MUTANTS, verdicts, strict=True):
        print(
            f"{'caught  ' if verdict else 'SURVIVED'}  {mutant.name}" + (f"\n            {verdict}" if verdict else "")
        )
    survivors = sum(verdict is None for verdict in verdicts)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} breaks were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
