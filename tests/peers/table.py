"""The table of docs/peers.md: every feature asked of every system, on four ranks over gloo.

python -m tests.peers.table            prints it
python -m tests.peers.table --write    and puts it into docs/peers.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.distributed.harness import RankFailure, Ranks
from tests.peers.features import FEATURES, ask
from tests.peers.systems import SYSTEMS

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
TIMEOUT_S = 40.0


def answer(ranks: Ranks, system: str, feature: str) -> str:
    """`yes`, `no` (another result, without an error), `error (of a type)`, or `hangs`."""
    try:
        return "yes" if all(ranks.run(4, ask, system, feature, timeout_s=TIMEOUT_S)) else "**no**"
    except RankFailure as failure:
        return f"error ({type(failure.error).__name__ if failure.error is not None else 'a rank died'})"
    except TimeoutError:
        return "**hangs**"


def rows(ranks: Ranks) -> list[str]:
    names = list(SYSTEMS)
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for feature in FEATURES:
        cells = [answer(ranks, system, feature) for system in names]
        lines.append(f"| {feature.replace('_', ' ')} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.peers.table")
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    with Ranks() as ranks:
        text = "\n".join(rows(ranks)) + f"\n\nFour ranks over gloo, torch {torch.__version__}.\n"
    print(text)
    if write:
        page = PAGE.read_text()
        start, stop = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(page[:start] + text + page[stop:])


if __name__ == "__main__":
    main()
