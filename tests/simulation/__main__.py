"""Run the simulator.

python -m tests.simulation [--seeds N] [--from SEED] [--quiet]
python -m tests.simulation --replay SEED
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.hazards import Fate
from tests.simulation.history import run_history
from tests.simulation.scenarios import SCENARIOS, every_strike, live
from tests.simulation.world import Broken

SEEDS = 20_000


def enumerate_all() -> tuple[int, int]:
    """Every scenario under every single strike, and the plain one under every pair; lives and strikes."""
    lives = strikes = 0
    for scenario in SCENARIOS:
        for plan in every_strike(scenario, pairs=scenario is SCENARIOS[0]):
            lives += 1
            strikes += len(plan)
            try:
                live(scenario, Fate.at(*plan))
            except (Broken, Exception) as error:
                told = ", ".join(f"{hazard} call {index}" for index, hazard in plan) or "no misfortune"
                raise Broken(f"{scenario.name}; {told}: {type(error).__name__}: {error}") from error
    return lives, strikes


def main() -> int:
    """Enumerate, then run seeded histories; 1 and a replayable seed if an invariant breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many histories (default %(default)s)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", type=int, help="run this seed alone, with the traceback of what breaks")
    parser.add_argument("--quiet", action="store_true", help="say only what breaks")
    chosen = parser.parse_args()
    if chosen.replay is not None:
        print(run_history(chosen.replay))
        return 0
    began = time.monotonic()
    try:
        lives, strikes = enumerate_all()
    except Broken as error:
        print(f"enumeration: {error}")
        return 1
    told_twice = paid_twice = calls = struck = 0
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        try:
            outcome = run_history(seed)
        except (Broken, Exception) as error:
            print(f"seed {seed} (replay: make simulate REPLAY={seed}): {type(error).__name__}: {error}")
            return 1
        calls += outcome.calls
        struck += outcome.struck
        told_twice += outcome.told_twice
        paid_twice += outcome.paid_twice
    if not chosen.quiet:
        print(f"enumerated   {lives} lives of {len(SCENARIOS)} scenarios, {strikes} strikes: every invariant held")
        print(f"histories    {chosen.seeds} from seed {chosen.first}, {calls} port calls, {struck} strikes: all held")
        print(f"told twice   {told_twice} targets, each by a strike between telling and noting (the documented window)")
        print(
            f"paid twice   {paid_twice} jobs, each by an answer lost before it was stored (a killed or frozen worker)"
        )
        print(f"took         {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
