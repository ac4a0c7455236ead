#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which lines and branches of include/heed do the tests run?

coverage.py BUILD            runs the portable tests and those of MPI in this build, made by clang with -fprofile-instr-generate
                             -fcoverage-mapping, and prints what no test ran of each header; ends with 1 below 98 % of lines or
                             90 % of branches
coverage.py BUILD FILE...    prints the lines of these headers which the last run missed, and where a branch went one way alone

A line or branch counts where any instance of a template ran it; code that no test makes an instance of is not seen, and clang 14 does
not count what it makes of a template for a precompiled header, so that more is run than is said here. Left out is what
runs while the compiler works (consteval, static_assert, `if constexpr`, constexpr functions that no test runs later), and what
EXCEPTIONS names.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = "include/heed/"
LINES, BRANCHES = 0.98, 0.90
EXCEPTIONS = {
    "plug/formula_probe.hpp": "what concepts call; it is never run",
}


def tool(name):
    return shutil.which(f"{name}-14") or shutil.which(name) or sys.exit(f"{name} was not found")


def run_tests(build):
    profiles = build / "profiles"
    shutil.rmtree(profiles, ignore_errors=True)
    environment = {**os.environ, "LLVM_PROFILE_FILE": str(profiles / "%4m.profraw")}
    # Two tests link the static library, which the lane does not build: it holds the code of the shared one.
    for chosen in ["-L", "portable", "-E", "^(headers|macros|c_program_static|c_symbols)"], ["-R", "^(ranks_test|mpi_ranks)"]:
        command = ["ctest", "--test-dir", build, *chosen, "--output-on-failure", "-j", str(os.cpu_count())]
        subprocess.run(command, env=environment, check=True)
    subprocess.run([tool("llvm-profdata"), "merge", "--sparse", "-o", build / "all.profdata", *profiles.glob("*.profraw")], check=True)


def covered(build):
    """{header: ({line: times}, {(line, column): (times true, times false)})} of all programs together."""
    programs = sorted(p for p in (build / "bin").iterdir() if p.is_file() and os.access(p, os.X_OK))
    objects = [word for program in programs[1:] for word in ("-object", program)]
    said = subprocess.run([tool("llvm-cov"), "export", "--format=text", f"--instr-profile={build / 'all.profdata'}",
                           "--skip-functions", programs[0], *objects, ROOT / INCLUDE],
                          check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    headers = {}
    for file in json.loads(said.stdout)["data"][0]["files"]:
        _, found, name = file["filename"].partition(INCLUDE)
        if found:
            headers[name] = lines_of(file["segments"]), branches_of(file["branches"])
    return headers


def lines_of(segments):
    """{line: times}. A segment (line, column, times, is counted, begins a region, is a gap) holds up to the next one."""
    by_line = defaultdict(list)
    for line, _, times, counted, begins, gap in segments:
        by_line[line].append((times, counted, begins, gap))
    found, before = {}, None
    for line in range(segments[0][0], segments[-1][0] + 1) if segments else ():
        here = by_line.get(line, [])
        entries = [times for times, counted, begins, gap in here if counted and begins and not gap]
        skipped = here and here[0][2] and not here[0][1]
        if not skipped and (entries or (before and before[1])):
            found[line] = max(entries + [before[0] if before and before[1] else 0])
        before = here[-1] if here else before
    return found


def branches_of(branches):
    """{(line, column): [times true, times false]}, over all instances."""
    found = defaultdict(lambda: [0, 0])
    for line, column, _, _, true, false, *_ in branches:
        found[line, column][0] += true
        found[line, column][1] += false
    return found


def at_compile_time(header, lines):
    """Lines that the compiler alone evaluates; of constexpr functions those that have no line which a test ran."""
    found, body, end = set(), [], None
    for number, line in enumerate((ROOT / INCLUDE / header).read_text().splitlines(), 1):
        if "if constexpr" in line or "static_assert" in line:
            found.add(number)
        if end is None and re.search(r"\b(consteval|constexpr) .*\(", line) and "if constexpr" not in line:
            end, body, always = " " * (len(line) - len(line.lstrip())), [], "consteval" in line
        if end is not None:
            body.append(number)
            if line.startswith(end + "}") or line.endswith((";", "}")) and len(body) == 1:
                if always or not any(lines.get(n) for n in body):
                    found.update(body)
                end = None
    return found


def missed(header, lines, branches):
    """Lines that no test ran, branches (line, way never taken) of lines that one did, and how many there are of both."""
    left_out = at_compile_time(header, lines)
    lines = {n: times for n, times in lines.items() if n not in left_out}
    ways = [(line, name, times) for (line, _), both in branches.items() if lines.get(line) and any(both)
            for name, times in zip(("true", "false"), both)]
    return [n for n in lines if not lines[n]], [(line, name) for line, name, times in ways if not times], len(lines), len(ways)


def ranges(numbers):
    text, begin = [], None
    for n in numbers:
        if begin is None or n != last + 1:
            begin = n
            text.append([n, n])
        text[-1][1] = last = n
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in text)


def main(arguments):
    if not arguments:
        sys.exit(__doc__)
    build, asked = Path(arguments[0]).resolve(), arguments[1:]
    if not asked:
        run_tests(build)
    totals = [0, 0, 0, 0]
    for header, (lines, branches) in sorted(covered(build).items()):
        if header in EXCEPTIONS:
            continue
        no_lines, no_ways, all_lines, all_ways = missed(header, lines, branches)
        totals = [a + b for a, b in zip(totals, (len(no_lines), all_lines, len(no_ways), all_ways))]
        if header in asked:
            source = (ROOT / INCLUDE / header).read_text().splitlines()
            for n in no_lines:
                print(f"{header}:{n}: {source[n - 1]}")
            for n, way in no_ways:
                print(f"{header}:{n}: never {way}: {source[n - 1].strip()}")
        elif not asked and (no_lines or no_ways):
            print(f"{header}: {len(no_lines)} of {all_lines} lines ({ranges(no_lines)}), {len(no_ways)} of {all_ways} branches "
                  f"({ranges(sorted({n for n, _ in no_ways}))})")
    share = [1 - totals[i] / max(1, totals[i + 1]) for i in (0, 2)]
    print(f"{100 * share[0]:.1f} % of {totals[1]:,} lines, {100 * share[1]:.1f} % of {totals[3]:,} branches")
    return 0 if asked or (share[0] >= LINES and share[1] >= BRANCHES) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
