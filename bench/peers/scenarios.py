"""What is done to each queue. Each scenario gives one row for a queue, or for each of its settings."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench.peers.ours import OurStage
from bench.peers.rows import Row
from bench.peers.stage import OURS, Peer, Stage

Say = Callable[[str], None]

# The provider's limits and the calls, as in bench/limits.py.
REQUESTS, TOKENS, BURST_SECONDS, CALL_SECONDS = 600, 60_000, 1.0, 1.0
INPUT_BYTES, OUTPUT_BYTES, CALL_TOKENS = 400, 200, 150
MATCH = "Recite"
GO_ON = "PEER_CALLS_GO_ON"
"""Whether calls outlive the worker that made them, where a queue can attach to them again: only Backburner can."""


def _stage(
    peer: Peer, units: int, threads: int, settings: Mapping[str, str] = MappingProxyType({})
) -> Stage | OurStage:
    """The peer with so many worker processes of so many threads."""
    if peer is OURS:
        return OurStage(units, threads, background=GO_ON in settings)
    return Stage(peer, units, threads, settings)


def crash(peer: Peer, say: Say, seed: int, share: float) -> list[Row]:
    """100 jobs of 2 s, all there at once, eight at a time; ten worker processes killed, 2 to 6 s apart."""
    rows = [_crash(peer, say, seed, share)]
    if peer is OURS:
        rows.append({**_crash(peer, say, seed, share, {GO_ON: "1"}), "limit": "go on at the provider"})
    return rows


def _crash(peer: Peer, say: Say, seed: int, share: float, more: Mapping[str, str] = MappingProxyType({})) -> Row:
    jobs, kills, patience = round(100 * share), round(10 * share), 240 * share
    dice = random.Random(seed)
    with _stage(peer, 2, 4, {"PEER_RECOVERY": "1", **more}) as stage:
        stage.provider.configure(latency_seconds=2.0)
        stage.submit(_numbered(jobs))
        killed_at: list[float] = []
        for number in range(kills):
            time.sleep(dice.uniform(2, 6))
            stage.kill(dice)
            killed_at.append(time.time())
            say(f"killed {number + 1} of {kills}")
        ends = _until_ended(stage, jobs, patience, say)
        recovered = time.time() - killed_at[-1] if sum(ends.values()) >= jobs else None
        calls = stage.provider.calls()
    return {
        "peer": peer.title, "limit": "end with their worker", "jobs": jobs, "kills": kills, **ends,
        "not_ended": jobs - sum(ends.values()), "cut_off": sum(call["outcome"] == "client_gone" for call in calls),
        "extra_calls": sum(count - 1 for count in _billed(calls).values()), "recovery_seconds": recovered,
        "repeated_ms_before_a_kill": _before_a_kill(calls, killed_at),
    }  # fmt: skip


def _before_a_kill(calls: Sequence[Mapping[str, Any]], killed_at: Sequence[float]) -> list[int]:
    """How long before a kill those calls had begun that were paid for and then made again, in milliseconds."""
    again = {prompt for prompt, count in _billed(calls).items() if count > 1}
    firsts = [min(call["began"] for call in calls if call["prompt"] == prompt) for prompt in again]
    return sorted(round(1000 * min((at - began for at in killed_at if at >= began), default=-1)) for began in firsts)


def same_key(peer: Peer, say: Say, seed: int, share: float) -> list[Row]:  # noqa: ARG001
    """20 keys, each submitted eight times at once."""
    keys, times = 20, 8
    with _stage(peer, 2, 4) as stage:
        stage.provider.configure(latency_seconds=0.2)
        for key in range(keys):
            stage.submit([(f"key-{key}", f"key {key:02d}.")] * times, threads=times)
        say("submitted")
        _until_quiet(stage, seconds=3.0)
        billed = _billed(stage.provider.calls())
    row = {
        "peer": peer.title, "deduplicates": peer.deduplicates, "keys": keys, "submitted": keys * times,
        "keys_called_twice": sum(count > 1 for count in billed.values()), "calls": billed.total(),
    }  # fmt: skip
    return [row]


def rate(peer: Peer, say: Say, seed: int, share: float) -> list[Row]:  # noqa: ARG001
    """300 jobs under 600 requests and 60,000 tokens a minute, of which tokens bind; 50 threads."""
    return [_rate(peer, say, share, setting) for setting in _settings(peer)]


def _settings(peer: Peer) -> Iterator[tuple[str, dict[str, str], int]]:
    """How a peer's limiter is set: a description, the settings, and how many worker processes share the threads."""
    if peer is OURS:
        yield "as the provider states them", {}, 5
        return
    if not peer.limits:
        yield "none", {}, 5
        return
    for calls in (REQUESTS, TOKENS // CALL_TOKENS):
        stated, limit = f"{calls}/min", {"PEER_RATE": str(calls)}
        yield stated, limit, 1 if peer.one_limited else 5
        if peer.one_limited:
            yield f"{stated}, a fifth for each of five workers", {"PEER_RATE": str(calls // 5)}, 5
        if peer.pauses:
            yield f"{stated}, and a pause after a 429", {**limit, "PEER_PAUSE": "1"}, 5


def _rate(peer: Peer, say: Say, share: float, setting: tuple[str, Mapping[str, str], int]) -> Row:
    limit, settings, units = setting
    jobs = round(300 * share)
    with _stage(peer, units, 50 // units, settings) as stage:
        stage.provider.configure(latency_seconds=CALL_SECONDS)
        stage.provider.script(MATCH, "x" * OUTPUT_BYTES)
        prompts = [f"{MATCH} {number} ".ljust(INPUT_BYTES, "x") for number in range(jobs)]
        limits = {"requests_per_minute": REQUESTS, "tokens_per_minute": TOKENS, "burst_seconds": BURST_SECONDS}
        stage.provider.configure(limits=limits)
        if isinstance(stage, OurStage):
            stage.limit(requests=REQUESTS, tokens=TOKENS)
        began = time.time()
        stage.submit([(f"rate-{number}", prompt) for number, prompt in enumerate(prompts)])
        say(f"limit {limit}: submitted")
        ends = _until_ended(stage, jobs, 360.0, say)
        calls = stage.provider.calls()
    billed = [call for call in calls if call["billed"]]
    tokens = sum(call["input_tokens"] + call["output_tokens"] for call in billed)
    ideal = (tokens - BURST_SECONDS * TOKENS / 60) / (TOKENS / 60) + CALL_SECONDS
    seconds = max(call["ended"] for call in billed) - began
    return {
        "peer": peer.title, "limit": limit, "jobs": jobs, **ends, "not_ended": jobs - sum(ends.values()),
        "utilisation": ideal / seconds, "seconds": seconds,
        "refusals": sum(call["outcome"] == "error:429" for call in calls),
    }  # fmt: skip


def burst(peer: Peer, say: Say, seed: int, share: float) -> list[Row]:  # noqa: ARG001
    """Capacity for 5 jobs a second (20 calls of 4 s); twice the peak of 3.5 arrive for 30 s."""
    per_second, seconds = 7.0, 30 * share
    jobs = round(per_second * seconds)
    with _stage(peer, 2, 10) as stage:
        stage.provider.configure(latency_seconds=4.0)
        submitted: dict[str, float] = {}
        began = time.time()
        for number, (key, prompt) in enumerate(_numbered(jobs)):
            time.sleep(max(0.0, began + number / per_second - time.time()))
            submitted[prompt] = time.time()
            stage.submit([(key, prompt)])
        say("submitted")
        ends = _until_ended(stage, jobs, 120.0, say)
        calls = stage.provider.calls()
    ended = {call["prompt"]: call["ended"] for call in calls if call["billed"]}
    waits = sorted(at - submitted[prompt] for prompt, at in ended.items())
    moments = sorted([(at, 1) for at in submitted.values()] + [(call["began"], -1) for call in calls])
    depth = deepest = 0
    for _, change in moments:
        depth += change
        deepest = max(deepest, depth)
    p50, p95, p99 = (_part(waits, part) for part in (0.5, 0.95, 0.99))
    row = {
        "peer": peer.title, "jobs": jobs, **ends, "not_ended": jobs - sum(ends.values()),
        "p50_seconds": p50, "p95_seconds": p95, "p99_seconds": p99, "deepest": deepest,
    }  # fmt: skip
    return [row]


def cpu(peer: Peer, say: Say, seed: int, share: float) -> list[Row]:  # noqa: ARG001
    """1,000 jobs whose calls take no time; one worker process of ten threads."""
    jobs = round(1000 * share)
    with _stage(peer, 1, 10) as stage:
        stage.provider.configure(latency_seconds=0.0)
        before = stage.cpu_seconds()
        began = time.time()
        stage.submit(_numbered(jobs))
        say("submitted")
        until = time.monotonic() + 180
        while _billed(stage.provider.calls()).total() < jobs and time.monotonic() < until:
            time.sleep(1.0)  # by the provider's ledger, so that asking costs the queue nothing
        seconds = max(call["ended"] for call in stage.provider.calls()) - began
        time.sleep(1.0)  # the last results' writes
        spent = stage.cpu_seconds() - before
        ends = _until_ended(stage, jobs, 10.0, say)
    return [
        {
            "peer": peer.title, "jobs": jobs, **ends, "not_ended": jobs - sum(ends.values()),
            "cpu_seconds_per_1000": spent * 1000 / jobs, "seconds": seconds,
        }
    ]  # fmt: skip


SCENARIOS: dict[str, Callable[..., list[Row]]] = {
    "crash": crash,
    "rate": rate,
    "burst": burst,
    "cpu": cpu,
    "same-key": same_key,
}


def _numbered(jobs: int) -> list[tuple[str, str]]:
    return [(f"job-{number}", f"job {number:04d}.") for number in range(jobs)]


def _billed(calls: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Calls that were paid for, by prompt: their answer was written, read or not."""
    return Counter(call["prompt"] for call in calls if call["billed"] or call["outcome"] == "client_gone")


def _until_ended(stage: Stage | OurStage, jobs: int, seconds: float, say: Say) -> dict[str, int]:
    """Wait until all have ended, or for so long; how they ended."""
    until = time.monotonic() + seconds
    while True:
        ends = stage.ends()
        say(f"{sum(ends.values())} of {jobs} ended")
        if sum(ends.values()) >= jobs or time.monotonic() > until:
            return ends
        time.sleep(1.0)


def _until_quiet(stage: Stage | OurStage, seconds: float) -> None:
    """Wait until no call has begun for so long."""
    while True:
        calls = stage.provider.calls()
        if calls and time.time() - max(call["began"] for call in calls) > seconds:
            return
        time.sleep(0.2)


def _part(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")
