"""The command `python -m soak`, with tests on PYTHONPATH; `make soak` runs it."""

import argparse
import sys
from pathlib import Path

from soak.campaign import Campaign, ranks, run_case
from soak.files import files
from soak.frames import frames
from soak.groups import cut_link, kill, nan, payloads, stop, strangers, warm_up
from soak.trainings import full_disk, kill_training, terminate

KINDS = {
    "frames": (frames, 10), "kill": (kill, 10), "nan": (nan, 4), "stop": (stop, 3), "payloads": (payloads, 3),
    "strangers": (strangers, 3), "files": (files, 3), "kill-training": (kill_training, 3),
    "terminate": (terminate, 2), "full-disk": (full_disk, 2), "cut-link": (cut_link, 2),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long; each kind has a case at least")
    parser.add_argument("--seed", default="0", help="what all cases are drawn from")
    parser.add_argument("--state", type=Path, help="file to write and to resume from; default: soak-SEED.json")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--case", metavar="KIND:SEED/NUMBER", help="run this case alone")
    given = parser.parse_args()
    ranks().run(warm_up, 2, timeout=900, group_timeout=900)
    if given.case:
        print(run_case(KINDS, given.case))
        return 0
    kinds = {kind: KINDS[kind] for kind in given.only or KINDS}
    campaign = Campaign(kinds, given.seed, given.state or Path(f"soak-{given.seed}.json"))
    try:
        campaign.run(60 * given.minutes)
    except KeyboardInterrupt:
        print("stopped")
    print(campaign.summary(), flush=True)
    return 1 if campaign.state["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
