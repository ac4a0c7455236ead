#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small faults drawn at random, all compiled into one build, each switched on by itself: how many do the tests notice?

mutants.py list COUNT SEED [FILE...]     prints COUNT mutants of include/heed/{engine,simd,mask,plug}, or of these files; ends with
                                         an error where a row of MUTANTS.md fits no line
mutants.py run COUNT SEED [FILE...]      plants them in a copy of the tree below build/mutants/ and runs random calls for each; then, for
                                         those that random calls do not notice, the portable tests that come past them, the
                                         quickest first; goes on where it was stopped, and looks again, by the
                                         tests of today, at what nothing has noticed; ends with 1 if less than 90 % are noticed of
                                         those that change a result (MUTANTS.md has the others)

A mutant is another comparison, the other sign, a number one larger, or a statement left out. The mutant that the environment's
HEED_MUTANT names is on; without it the copy computes what the tree does. Places that only a compiler reads cannot be switched:
each one that does not compile is left out, and the next of the drawing takes its place.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faults

ROOT = faults.ROOT
WORK = ROOT / "build" / "mutants"
COPY = faults.Copy(WORK)
ROOMS = "engine", "simd", "mask", "plug"
# Notice a third of all mutants, in seconds, and are built in minutes.
RANDOM_CALLS = (["heed_fuzz_calls", "--count", "2000"], ["heed_fuzz_calls", "--count", "10000", "--seed", "700001"])

# Each operator stands behind itself once more with the switch between: `a < b` is `a < heed_mutants::Other{7} < b`, which binds as
# before, and compares by <= where mutant 7 is on.
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*"}
PLACE = re.compile(r" (<|<=|>|>=|==|!=|\+|-|\*|/) (?=[\w(~!-])|(?<=[ (\[])(\d)(?=[ ;)\],])|^( +)([a-z]\w*[\w.\->\[\]]*(?: [-+*]?= |\()[^;{}]*\));$")
# Lines that a compiler reads, or that hold text.
LEFT_OUT = re.compile(r'constexpr|virtual|static_assert|template|requires|concept|operator|using |typename|enum |#|"|\breturn \{|: \w+\(|case |^\s*//')

SWITCHES = "\n".join(
    ["#pragma once", "#include <cstdlib>", "#include <fstream>", "#include <string>", "#include <unistd.h>", "namespace heed_mutants {",
     "inline const int active = std::getenv(\"HEED_MUTANT\") ? std::atoi(std::getenv(\"HEED_MUTANT\")) : -1;",
     """// The mutants that the program came past, written when it ends.
struct Reached {
  bool at[65536] = {};
  ~Reached() {
    const char* const folder = std::getenv("HEED_MUTANTS_REACHED");
    if (!folder) return;
    std::ofstream file(folder + ("/" + std::to_string(getpid())));
    for (int n = 0; n < 65536; ++n)
      if (at[n]) file << n << "\\n";
  }
};
inline Reached reached;
inline bool on(int mutant) {
  reached.at[mutant] = true;
  return mutant == active;
}""",
     "inline int number(int mutant, int n) { return on(mutant) ? n + 1 : n; }",
     "struct Other { int mutant; };"] +
    [f"""template <class A> struct Left{at} {{ A a; int mutant; }};
template <class A> constexpr auto operator{old}(const A& a, Other other) {{ return Left{at}<A>{{a, other.mutant}}; }}
template <class A, class B> constexpr auto operator{old}(Left{at}<A> left, const B& b) -> decltype(left.a {old} b) {{
  return on(left.mutant) ? left.a {new} b : left.a {old} b;
}}""" for at, (old, new) in enumerate(OTHER.items())] + ["}", ""])


def all_files():
    return [path.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / "include/heed" / room).rglob("*.hpp"))]


# Where a mutant may stand: the number of the line counts from 0, `code` is the line; `switch` is what takes the place of `text`, and
# `change` says it in words.
Place = namedtuple("Place", "file line column text switch change code")


def places(files):
    """Everywhere a mutant may stand."""
    found = []
    for file in files:
        before, asserts = "", False
        for number, line in enumerate((ROOT / file).read_text().splitlines()):
            last, before = before, line.split("//")[0].rstrip() or before
            code = line.split("//")[0].rstrip()
            asserts = "static_assert" in code or asserts and not last.endswith(";")
            if last.endswith("\\") or not code.startswith("  ") or asserts or LEFT_OUT.search(code):
                continue
            for hit in PLACE.finditer(code):
                sign, digit, indent, statement = hit.groups()
                if sign:
                    change = f" {sign} heed_mutants::Other{{%d}} {sign} ", f"{OTHER[sign]} for {sign}"
                elif digit:
                    change = f"heed_mutants::number(%d, {digit})", f"{int(digit) + 1} for {digit}"
                elif last.endswith((";", "{", "}")):
                    change = f"{indent}heed_mutants::on(%d) ? void() : void({statement});", "left out"
                else:
                    continue
                found.append(Place(file, number, hit.start(), hit[0], *change, line.strip()))
    return found


def explained():
    """What changes no result: (file, line, change in words), the rows of MUTANTS.md, each of which fits a line of the tree."""
    cells = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.+?) \|", (ROOT / "tests/MUTANTS.md").read_text(), re.M)
    rows = {(f"include/heed/{file}", line.replace(r"\|", "|"), change) for file, line, change in cells}
    if stale := rows - {row_of(place) for place in places(all_files())}:
        sys.exit(f"MUTANTS.md has rows that fit no line: {stale}")
    return rows


def row_of(place):
    """What a row of MUTANTS.md says of a place, wherever its line has moved."""
    return str(place.file), place.code, place.change


def name_of(place):
    """A place in words that hold wherever its line moves."""
    return f"{place.file}: {place.code} [{place.column}] -> {place.change}"


def drawn(files, seed):
    """Places in an order drawn by the seed and the text of each, so that a change of the code leaves the order of all others; no two
    of one line, so that an error names one of them."""
    order = sorted(places(files), key=lambda place: hashlib.sha256(f"{seed} {name_of(place)}".encode()).digest())
    lines, chosen = set(), []
    for place in order:
        if place[:2] not in lines:
            lines.add(place[:2])
            chosen.append(place)
    return chosen


def words(number, place):
    return f"{number:>4}  {place.file}:{place.line + 1}: {place.text.strip()} -> {place.change}"


def plant(chosen):
    """Writes the copy of the tree with these mutants, by number."""
    by_file = {}
    for number, place in chosen.items():
        by_file.setdefault(place.file, []).append((number, place))
    config = Path("include/heed/core/config.hpp")
    for file in {path.relative_to(ROOT) for path in (ROOT / "include/heed").rglob("*.hpp")}:
        lines = (ROOT / file).read_text().splitlines()
        for number, place in by_file.get(file, []):
            before, behind = lines[place.line][:place.column], lines[place.line][place.column + len(place.text):]
            lines[place.line] = before + place.switch % number + behind
        text = "\n".join(lines) + "\n"
        if file == config:
            text = text.replace("#pragma once\n", "#pragma once\n#include <heed/mutants.hpp>\n", 1)
        if (COPY.tree / file).read_text() != text:
            (COPY.tree / file).write_text(text)
    (COPY.tree / "include/heed/mutants.hpp").write_text(SWITCHES)


def refused(log, chosen):
    """Numbers of mutants at lines that the compiler's output names in an error, or else in its notes, or else where it has inlined
    what the error names."""
    at = {(str(place.file), place.line + 1): number for number, place in chosen.items()}
    pattern = re.compile(r"(include/heed/[\w/]+\.hpp):(\d+):\d+: (\w[\w ]*):")
    named = [(at.get((hit[1], int(hit[2]))), "error" in hit[3]) for hit in pattern.finditer(log)]
    errors = {number for number, error in named if number is not None and error}
    inlined = re.finditer(r" at \S*(include/heed/[\w/]+\.hpp):(\d+):\d+", log)
    return errors or {number for number, _ in named if number is not None} or \
        {at[place] for place in ((hit[1], int(hit[2])) for hit in inlined) if place in at}


def build_with(order, count, target, left_out):
    """Plants the first `count` places that compile, and builds the target; returns them by number. Others join `left_out`."""
    waiting = [(number, place) for number, place in enumerate(order) if name_of(place) not in left_out]
    chosen, waiting = dict(waiting[:count]), waiting[count:]
    while True:
        plant(chosen)
        log = COPY.run(["ninja", "-k", "0", target])
        if log.returncode == 0:
            return chosen
        bad = refused(log.stdout, chosen)
        if not bad:
            sys.exit(f"the copy does not build, and no mutant is to blame: see {WORK / 'build.log'}")
        print(f"{len(bad)} places do not compile and are left out", flush=True)
        for number in bad:
            left_out.append(name_of(chosen.pop(number)))
            if waiting:
                chosen.__setitem__(*waiting.pop(0))


def noticed_by_random_calls(number, seconds):
    """The program that notices the mutant, or an empty text; a program may take so many seconds."""
    return next((name for name, *arguments in RANDOM_CALLS
                 if COPY.outcome([COPY.build / "bin" / name, *arguments], seconds, HEED_MUTANT=str(number))[0]), "")


def seconds_of_random_calls():
    """How long they may take, from how long they take with no mutant switched on."""
    begin = time.monotonic()
    if noticed_by_random_calls(-1, 3600):
        sys.exit("random calls fail with no mutant switched on")
    return 60 + 10 * (time.monotonic() - begin)


def ctest(*words):
    return ["ctest", "--test-dir", COPY.build, "--timeout", "600", *words]


def reached_by_tests():
    """{test: (seconds, numbers of the mutants that it comes past)}. Each test must pass with no mutant switched on."""
    listed = subprocess.run(ctest("-N", "-L", "portable", "-E", "^(headers|macros|c_)"), check=True, text=True, stdout=subprocess.PIPE).stdout
    folder, found = WORK / "reached", {}
    for test in re.findall(r"Test +#\d+: (\S+)", listed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin = time.monotonic()
        if COPY.outcome(ctest("-R", f"^{test}$"), 3600, HEED_MUTANTS_REACHED=str(folder))[0]:
            sys.exit(f"{test} fails with no mutant switched on")
        found[test] = time.monotonic() - begin, sorted({int(n) for file in folder.iterdir() for n in file.read_text().split()})
    return found


def noticed_by_tests(number, reached):
    """The test that notices the mutant, or an empty text."""
    for test, (seconds, numbers) in sorted(reached.items(), key=lambda entry: entry[1][0]):
        if number in numbers and COPY.outcome(ctest("-R", f"^{test}$"), 60 + 10 * seconds, HEED_MUTANT=str(number))[0]:
            return test
    return ""


def run(files, count, seed, without_effect):
    WORK.mkdir(parents=True, exist_ok=True)
    COPY.refresh()
    order = drawn(files, seed)
    file = WORK / f"results_{seed}.json"
    done = json.loads(file.read_text()) if file.is_file() else {"do not compile": []}

    def stage(target, prepare, look, before):
        """Fills in the mutants of which `done` says `before`; returns those that nothing notices. look(number, prepare()) names a test."""
        chosen = build_with(order, count, target, done["do not compile"])
        keys = {number: name_of(place) for number, place in chosen.items()}
        file.write_text(json.dumps(done, indent=0))
        prepared = prepare()
        waiting = [number for number in sorted(chosen) if done.get(keys[number], before) == before]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, name in zip(waiting, pool.map(lambda number: look(number, prepared), waiting)):
                done[keys[number]] = name
                file.write_text(json.dumps(done, indent=0))
                print(f"{words(number, chosen[number])}: {name or 'NOT NOTICED'}", flush=True)
        return [place for number, place in chosen.items() if not done[keys[number]]]

    missed = stage("heed_fuzz_calls", seconds_of_random_calls, noticed_by_random_calls, None)
    print(f"random calls notice {count - len(missed)} of {count} mutants", flush=True)
    missed = stage("heed_portable", reached_by_tests, noticed_by_tests, "")
    counting = sum(row_of(place) not in without_effect for place in missed)
    print(f"{count - len(missed)} of {count} mutants noticed, {len(missed) - counting} change no result")
    return int(counting > 0.1 * (count - len(missed) + counting))


def main(arguments):
    if len(arguments) < 3 or arguments[0] not in ("list", "run"):
        sys.exit(__doc__)
    count, seed = int(arguments[1]), int(arguments[2])
    files = [Path(name) for name in arguments[3:]] or all_files()
    without_effect = explained()
    if arguments[0] == "run":
        return run(files, count, seed, without_effect)
    for number, place in enumerate(drawn(files, seed)[:count]):
        print(words(number, place))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
