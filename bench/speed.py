#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is each variant as fast as it was? Ratios of this build to those of bench/baseline/, and to another commit beside it.

speed.py BENCH                    measures with this heed_bench, and compares with the baseline of this class of processor
speed.py BENCH --since REVISION   besides builds heed_bench of that commit below build/speed/, and measures both in turns
speed.py BENCH --keep             writes the baseline of this class anew

A number of the baseline is the time of a variant over that of plain attention, of `sdpa` itself one over its share of the peak: both
are measured in turns, so that they hold for every machine of a class. Each is the median of five runs of the benchmark. One that
is more than 3 % above is measured up to three times more, fifteen runs each, and counts as lost by the median of all its runs; the
program ends with 1 if one is.
"""
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "speed"
CASES = "H4_T512_d64_causal", "H4_T2048_d64", "H4_T2048_d64_causal", "H2_T2048_d128"
PEERS = "naive-eigen", "openblas", "libtorch"
ROUNDS, LIMIT = 5, 1.03


def measured(bench, names):
    """One run of these benchmarks: the processor's class, and {"dar/forward/H4_T512_d64_causal": number}."""
    full = [f"{variant}/{a_pass}/float/{case}" for variant, a_pass, case in (name.split("/") for name in names)]
    said = json.loads(subprocess.run([bench, "--benchmark_format=json", f"--benchmark_filter=^({'|'.join(full)})/"], check=True,
                                     text=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout)
    numbers = {}
    for run in said["benchmarks"]:
        variant, a_pass, _, case = run["name"].split("/")[:4]
        numbers[f"{variant}/{a_pass}/{case}"] = run.get("x_sdpa") or 1 / run["peak"]
    return said["context"]["machine"].split(", ")[-1], numbers


def measure(benches, names, rounds, runs):
    """Adds the numbers of so many rounds to `runs`, a {name: list} for each bench; the benches take turns. Returns the processor's
    class."""
    for _ in range(rounds):
        for bench, of_bench in zip(benches, runs):
            machine, numbers = measured(bench, names)
            for name in names:
                of_bench[name].append(numbers[name])
    return machine


def names_of(bench):
    """What --table of this heed_bench measures, without other libraries."""
    said = subprocess.run([bench, "--benchmark_list_tests=true", f"--benchmark_filter=^[^:/]*/[a-z]*/float/({'|'.join(CASES)})/"],
                          check=True, text=True, stdout=subprocess.PIPE).stdout
    parts = [line.split("/") for line in said.splitlines()]
    return [f"{p[0]}/{p[1]}/{p[3]}" for p in parts if p[0] not in PEERS]


def plain(name):
    return "sdpa/" + name.split("/", 1)[1]


def times(numbers):
    """Ratios to the peak in place of those to plain attention, which may have lost as well."""
    return {name: number * (1 if name == plain(name) else numbers[plain(name)]) for name, number in numbers.items()}


def lost(numbers, old):
    return [name for name in numbers if name in old and numbers[name] > LIMIT * old[name]]


def build_of(revision):
    """heed_bench of this commit, or None where the history does not have it."""
    found = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE)
    if found.returncode != 0:
        return None
    tree, build = WORK / "tree", WORK / "build"
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", found.stdout.strip()], cwd=tree, check=True)
    for command in (["-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
                    ["--build", build, "--target", "heed_bench"]):
        subprocess.run(["cmake", *command], check=True, stdout=subprocess.DEVNULL)
    return str(build / "bin" / "heed_bench")


def main(arguments):
    options = arguments[1:]
    if not arguments or arguments[0].startswith("-") or not (options in ([], ["--keep"]) or (len(options) == 2 and options[0] == "--since")):
        sys.exit(__doc__)
    benches = arguments[:1]
    if len(options) == 2:
        if before := build_of(options[1]):
            benches.append(before)
        else:
            print(f"{options[1]} is not in the history at hand: measured against the baseline alone")
    names = names_of(benches[0])
    runs = [{name: [] for name in names} for _ in benches]
    machine = measure(benches, names, ROUNDS, runs)

    def medians():
        return [{name: median(numbers) for name, numbers in of_bench.items()} for of_bench in runs]

    file = ROOT / "bench/baseline" / (machine.split(" (")[0].lower().replace(" ", "-") + ".csv")
    if options == ["--keep"]:
        file.write_text("benchmark,over\n" + "".join(f"{name},{number:.3f}\n" for name, number in medians()[0].items()))
        return 0
    baseline = {}
    if file.exists():
        baseline = {name: float(number) for name, number in (line.split(",") for line in file.read_text().splitlines()[1:])}
    else:
        print(f"there is no {file.relative_to(ROOT)}: nothing is known of {machine}")

    def compared():
        found = medians()
        pairs = [(found[0], baseline, "the baseline")]
        pairs += [(times(found[0]), times(before), options[1]) for before in found[1:]]
        return [(name, f"lost: {name} takes {100 * (now[name] / old[name] - 1):+.0f} % beside {what}")
                for now, old, what in pairs for name in lost(now, old)]

    gone = compared()
    for _ in range(3):
        if gone:
            measure(benches, sorted({*dict(gone), *map(plain, dict(gone))}), 3 * ROUNDS, runs)
            gone = compared()
    for _, sentence in gone:
        print(sentence)
    print(f"{len(names) - len(dict(gone))} of {len(names)} ratios hold on {machine}")
    return 0 if baseline and not gone else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
