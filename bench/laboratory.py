#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do variants learn what bench/RESULTS.md says? Trains seven variants on four of its tasks again, with its command.

laboratory.py HEED_COMPARE FOLDER     results go into FOLDER; a task whose results are there is not trained again

A cell of the table is the mean of five seeds. It holds where the new mean is no further from it than two means of five such runs are
in 95 of 100 cases (Student's t, the deviations of both pooled). One or two of 28 are further by chance; the program ends
with 1 where more than three are.
"""
import json
import re
import subprocess
import sys
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parent.parent
TASKS = "induction", "dyck", "listops", "flip-flop:len=64"
SEEDS, STUDENT, ROUNDED = 5, 2.306, 0.001


def table():
    """{task: (steps, {variant: (mean, deviation)})} of the first table of accuracies."""
    text = (ROOT / "bench/RESULTS.md").read_text()
    lines = re.search(r"\n(\| task \| steps \|.*\n\|---.*\n(?:\|.*\n)+)", text)[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    variants = cells[0][2:]
    return {row[0]: (row[1], {variant: tuple(float(x) for x in re.findall(r"[0-9.]+", cell)[:2])
                              for variant, cell in zip(variants, row[2:])}) for row in cells[2:]}


def trained(compare, folder, task, steps, variants):
    """{variant: accuracies of the seeds on held-out sequences}."""
    file = folder / f"{task}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        extra = ["--lengths", "2"] if task == "dyck" else []
        subprocess.run([compare, "--task", task, "--train", steps, "--variants", ",".join(variants), "--sweep", "lr=1e-3,2e-3,4e-3",
                        "--seeds", str(SEEDS), "--jobs", "2", "--threads", "1", *extra, "--json", part], check=True)
        part.rename(file)
    accuracies = {variant: [] for variant in variants}
    for record in json.loads(file.read_text())["records"]:
        if record["test"] == "held out":
            accuracies[record["variant"]].append(record["accuracy"] or 0)
    return accuracies


def main(arguments):
    if len(arguments) != 2 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    known, outside, cells = table(), 0, 0
    for task in TASKS:
        steps, stated = known[task]
        for variant, found in trained(arguments[0], folder, task, steps, list(stated)).items():
            before, deviation = stated[variant]
            width = STUDENT * sqrt((deviation**2 + stdev(found) ** 2) / SEEDS) + ROUNDED
            holds = abs(mean(found) - before) <= width
            print(f"{task}, {variant}: {mean(found):.3f}, the table says {before:.3f}" + ("" if holds else f": not within {width:.3f}"))
            cells, outside = cells + 1, outside + (not holds)
    print(f"{cells - outside} of {cells} cells hold")
    return 1 if outside > 3 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
