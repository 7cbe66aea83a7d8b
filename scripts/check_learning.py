"""Check that a run has learned: a part of the reward, over its first and its last steps.

python scripts/check_learning.py runs/latest exact --first 10 --at-most 0.25 --last 30 --at-least 0.75
"""

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("part", help="part of the reward, as in metrics.jsonl: reward/<part>")
    parser.add_argument("--first", type=int, required=True, help="steps at the start")
    parser.add_argument("--at-most", type=float, required=True, help="bound of their mean")
    parser.add_argument("--last", type=int, required=True, help="steps at the end")
    parser.add_argument("--at-least", type=float, required=True, help="bound of their mean")
    arguments = parser.parse_args()
    steps = {}
    for line in (arguments.run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps[record["step"]] = record[f"reward/{arguments.part}"]  # a replayed step counts as it was replayed
    values = [value for _, value in sorted(steps.items())]
    if len(values) < arguments.first + arguments.last:
        print(f"only {len(values)} steps", file=sys.stderr)
        return 1
    first = sum(values[: arguments.first]) / arguments.first
    last = sum(values[-arguments.last :]) / arguments.last
    learned = first <= arguments.at_most and last >= arguments.at_least
    print(
        f"{arguments.part}: {first:.3f} over the first {arguments.first} steps (at most {arguments.at_most}), "
        f"{last:.3f} over the last {arguments.last} (at least {arguments.at_least}): "
        f"{'learned' if learned else 'NOT LEARNED'}"
    )
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
