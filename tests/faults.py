#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of FAULTS.md that carry their change are replayed: each fault is planted, its test must fail.

faults.py check              does each such row fit its file? Nothing is built; exit 1 if one does not
faults.py replay NUMBER...   plants these faults one after the other, in a copy of the tree below build/faults/
faults.py draw COUNT SEED    numbers of rows, drawn at random
faults.py share N COUNT      numbers of each COUNT-th row, from row N on (0 is the first)

A test that can do without a fault's row is one that fails without the fault, or passes with it; both end with 1.
"""
import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "faults"
TREE, BUILD = WORK / "tree", WORK / "build"
SPAN = re.compile(r"`([^`]+)`")
# What ctest entries run that are no program heed_<name>.
TARGETS = {"python_test": "heed_c", "torch_test": "heed_torch", "headers": "heed_headers", "macros": "heed_macros",
           "c_symbols": "heed_c", "golden_replay": "heed_replay", "ranks_test_2": "heed_ranks_test",
           "ranks_test_4": "heed_ranks_test"}


class Row:
    """A row of a table, with its change, edits (file, old, new), and the command that notices it."""

    def __init__(self, number, fault, test):
        self.number, self.test = number, test
        self.sometimes = "now and then" in test
        self.at_compile_time = "at compile time" in test
        self.edits = edits_of(fault)


def located(name):
    """The file of this name, below include/heed/ or the checkout; None if there is none."""
    for folder in ROOT / "include/heed", ROOT:
        if "." in name and (folder / name).is_file():
            return (folder / name).relative_to(ROOT)
    return None


def edits_of(fault):
    """`file` ...: `old` => `new`, or => nothing. Each file that is named holds for the edits behind it."""
    edits, file = [], None
    spans = list(SPAN.finditer(fault))
    for at, span in enumerate(spans):
        text = span[1].replace(r"\|", "|")
        behind = fault[span.end():]
        if behind.startswith(" => "):
            new = "" if behind.startswith(" => nothing") else spans[at + 1][1].replace(r"\|", "|")
            edits.append((file, text, new))
        elif not fault[:span.start()].endswith(" => "):
            file = located(text) or (file if file else Path(text))
    return edits


def rows():
    """All rows by number. "the same" names the test of the row above."""
    found, test = {}, ""
    for line in (ROOT / "tests/FAULTS.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or not cells[0].isdigit():
            continue
        number, fault, named = int(cells[0]), cells[1], cells[2]
        same = named.startswith("the same")
        test = test if same else named
        if number in found:
            sys.exit(f"FAULTS.md: number {number} stands twice")
        found[number] = Row(number, fault, test + named[len("the same"):] if same else test)
    return found


def matches(text, old):
    """Where `old` stands, whatever white space divides its words."""
    return list(re.finditer(r"\s+".join(map(re.escape, old.split())), text))


def problem_of(row, tree):
    """Why the row does not fit the files of `tree`, or an empty text."""
    for file, old, new in row.edits:
        if not (tree / file).is_file():
            return f"there is no {file}"
        count = len(matches((tree / file).read_text(), old))
        if count != 1:
            return f"{file} holds `{old}` {count} times"
    return ""


def case_of(row):
    """The name of the test case that the row names, as its source has it; empty where it names none."""
    case = re.match(r'`\w+_test`[^"]*"(.*?)"', row.test)
    if not case or row.test.startswith(("`python_test", "`torch_test")):
        return ""
    return re.sub(r"\\([,|])", r"\1", case[1])


def check():
    replayable = [row for row in rows().values() if row.edits]
    problems = [f"row {row.number}: {problem}" for row in replayable if (problem := problem_of(row, ROOT))]
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.[ch]pp")))
    sources = re.sub(r'"\s*\n\s*"', "", sources)  # literals that are joined
    for row in replayable:
        if case_of(row).rsplit(" - ", 1)[0] not in sources:
            problems.append(f"row {row.number}: no test is called \"{case_of(row)}\"")
    print(*problems, f"{len(replayable)} rows carry their change, {len(problems)} do not fit", sep="\n")
    return int(bool(problems))


def copy_tree():
    """Makes TREE equal to the checkout; files that are equal keep their time stamps, so that they are not built again."""
    wanted = set()
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        folders[:] = [name for name in folders if name != "__pycache__" and str(here / name) not in ("build", ".git")]
        for name in files:
            source, copy = ROOT / here / name, TREE / here / name
            wanted.add(copy)
            if not copy.is_file() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)
    for copy in TREE.rglob("*"):
        if copy.is_file() and copy not in wanted:
            copy.unlink()


def configure():
    """With the library at -O1, which takes a third less to build; tests have flags of their own."""
    command = ["cmake", "-S", TREE, "-B", BUILD, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
    command += [f"-DHEED_BUILD_{part}=ON" for part in ("TESTS", "BENCH", "EXAMPLES")]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    if shutil.which("ccache"):
        command += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_C_COMPILER_LAUNCHER=ccache"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def build(target):
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
    command = ["cmake", "--build", BUILD, "--target", target, "--parallel", jobs]
    log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (WORK / "build.log").write_text(log.stdout)
    return log.returncode == 0


def targets():
    listed = subprocess.run(["cmake", "--build", BUILD, "--target", "help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"\bheed_\w+", listed.stdout))


def command_of(row, known):
    """The target to build, if any, and the command of the named test."""
    words = SPAN.match(row.test)
    if not words:
        sys.exit(f"row {row.number} names no test")
    words = words[1].split()
    name = words[2] if words[:2] == ["ctest", "-R"] else words[0]
    if under_mpirun := re.search(r"^`ranks_test` on (two|four) ranks", row.test):
        name += {"two": "_2", "four": "_4"}[under_mpirun[1]]
    if name.startswith("heed_") and name in known:
        return name, [BUILD / "bin" / name, *words[1:]]
    program = "heed_" + name
    if program in known and case_of(row):
        return program, [BUILD / "bin" / program, re.sub(r"([,\[])", r"\\\1", case_of(row))]
    target = program if program in known else TARGETS.get(name)
    return target, ["ctest", "--test-dir", BUILD, "-R", f"^{name}$", "--no-tests=error"]


def outcome(command, seconds, **variables):
    """Exit code and text of a test, with these variables in its environment. One that hangs is ended with all its processes, and fails."""
    environment = {"OMP_NUM_THREADS": "2", **os.environ, **variables}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=BUILD, start_new_session=True)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        log.seek(0)
        return code, log.read().decode(errors="replace")


def passes(command, seconds=1200):
    """Does the test pass? A name of Catch2's may lack the type behind it."""
    for words in command, [*command[:-1], f"{command[-1]}*"]:
        code, text = outcome(words, seconds)
        if not re.search("No test cases matched|No tests ran", text):
            return code == 0
    sys.exit(f"no test has the name that {command} asks for")


def replay_row(row, known):
    """In one word or two, what came of the row; empty if its test notices the fault."""
    problem = problem_of(row, TREE)
    if problem:
        return problem
    target, command = command_of(row, known)
    if target and not build(target):
        return f"{target} does not build without the fault, see build.log"
    begin = time.monotonic()
    if not passes(command):
        return "the test fails without the fault"
    seconds = 60 + 10 * (time.monotonic() - begin)
    texts = {file: (TREE / file).read_text() for file, _, _ in row.edits}
    try:
        for file, old, new in row.edits:
            text = (TREE / file).read_text()
            place = matches(text, old)[0]
            (TREE / file).write_text(text[:place.start()] + new + text[place.end():])
        built = not target or build(target)
        if row.at_compile_time or not built:
            return "" if row.at_compile_time and not built else "it builds" if built else "it does not build, see build.log"
        tries = 20 if row.sometimes else 1
        return "" if any(not passes(command, seconds) for _ in range(tries)) else "the test passes with the fault"
    finally:
        for file, text in texts.items():
            (TREE / file).write_text(text)


def replay(numbers):
    known_rows = rows()
    for number in numbers:
        if number not in known_rows or not known_rows[number].edits:
            sys.exit(f"there is no row {number} that carries its change")
    WORK.mkdir(parents=True, exist_ok=True)
    with open(WORK / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another replay works in {WORK}")
        return replay_rows([known_rows[number] for number in numbers])


def replay_rows(all_rows):
    copy_tree()
    configure()
    known, unnoticed = targets(), 0
    for row in all_rows:
        wrong = replay_row(row, known)
        unnoticed += bool(wrong)
        print(f"{row.number:>4}  {wrong or 'noticed'}", flush=True)
    print(f"{len(all_rows) - unnoticed} faults noticed, {unnoticed} not")
    return int(bool(unnoticed))


def main(words):
    if words == ["check"]:
        return check()
    if len(words) > 1 and words[0] == "replay":
        return replay([int(word) for word in words[1:]])
    if len(words) == 3 and words[0] in ("draw", "share"):
        numbers = [row.number for row in rows().values() if row.edits]
        first, second = int(words[1]), int(words[2])
        print(*random.Random(second).sample(numbers, first) if words[0] == "draw" else numbers[first::second])
        return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
