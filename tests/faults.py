#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of FAULTS.md that carry their change are replayed: each fault is planted, its test must fail.

faults.py check              does each such row fit its file? Nothing is built; exit 1 if one does not
faults.py replay NUMBER...   plants these faults, one at a time in each of as many copies of the tree below build/faults/ as there are processors
faults.py draw COUNT SEED    numbers of rows, drawn at random
faults.py share N COUNT      numbers of part N, from 0 on, of COUNT parts of the rows; those of one program stand together

A test that can do without a fault's row is one that fails without the fault, or passes with it; both end with 1, but for faults that
change an order, which are noticed now and then.
"""
import contextlib
import fcntl
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "faults"
SPAN = re.compile(r"`([^`]+)`")
PASSES = "the test passes with the fault"
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
    problems += [f"row {row.number} names no test" for row in replayable if not SPAN.match(row.test)]
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.[ch]pp")))
    sources = re.sub(r'"\s*\n\s*"', "", sources)  # literals that are joined
    for row in replayable:
        if case_of(row).rsplit(" - ", 1)[0] not in sources:
            problems.append(f"row {row.number}: no test is called \"{case_of(row)}\"")
    print(*problems, f"{len(replayable)} rows carry their change, {len(problems)} do not fit", sep="\n")
    return int(bool(problems))


class Copy:
    """A copy of the checkout, and its build by Ninja, below a folder."""

    def __init__(self, folder):
        self.folder, self.tree, self.build = folder, folder / "tree", folder / "build"
        self.targets = set()
        self.saved = None  # while a fault is planted, the names of outputs that are kept as they were
        self.seconds = {}  # of each command without a fault; None where it fails

    def refresh(self):
        """Makes the copy equal to the checkout, and configures its build, with the library at -O1, which takes a third less to build, and
        libheed for two instruction sets, which its tests need at least; tests have flags of their own. Files that are equal keep their time stamps, so that they are not built again."""
        wanted = set()
        for folder, folders, files in os.walk(ROOT):
            here = Path(folder).relative_to(ROOT)
            folders[:] = [name for name in folders if name != "__pycache__" and str(here / name) not in ("build", ".git")]
            for name in files:
                source, copy = ROOT / here / name, self.tree / here / name
                wanted.add(copy)
                if not copy.is_file() or copy.read_bytes() != source.read_bytes():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, copy)
        for copy in self.tree.rglob("*"):
            if copy.is_file() and copy not in wanted:
                copy.unlink()
        command = ["cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
                   "-DHEED_BUILD_TESTS=ON", "-DHEED_BUILD_EXAMPLES=ON", "-DHEED_BUILD_BENCH=OFF"]
        if platform.machine() == "x86_64":
            command.append("-DHEED_C_LEVELS=x86-64-v2;x86-64-v3")
        if shutil.which("ccache"):
            command += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_C_COMPILER_LAUNCHER=ccache"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.targets = set(re.findall(r"\bheed_\w+", self.run(["ninja", "-t", "targets", "all"]).stdout))

    def run(self, command):
        """Runs a step of the build, whose output is kept in build.log. Copies share what ccache has."""
        environment = {**os.environ, "CCACHE_BASEDIR": str(self.folder)}
        done = subprocess.run(command, cwd=self.build, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (self.folder / "build.log").write_text(done.stdout)
        return done

    def builds(self, *targets, jobs=1):
        ninja = ["ninja", "-j", str(jobs)]
        if self.saved is not None:
            for line in self.run([*ninja, "-n", *targets]).stdout.splitlines():
                self.save(line.split()[-1])
        return self.run([*ninja, *targets]).returncode == 0

    def error(self):
        """The first line of build.log that names an error."""
        return next((line for line in (self.folder / "build.log").read_text().splitlines() if "error" in line), "see build.log")

    def save(self, output):
        path, copy = self.build / output, self.folder / "saved" / output
        if output not in self.saved and path.is_file():
            self.saved.add(output)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)

    def outputs(self):
        """What Ninja has built, and when: the last line of its log for each output."""
        log = self.build / ".ninja_log"
        lines = [line.split("\t") for line in log.read_text().splitlines()[1:]] if log.is_file() else []
        return {line[3]: line for line in lines}

    def inputs(self, program):
        """What Ninja builds a program of: its own objects, and all files."""
        files = self.run(["ninja", "-t", "inputs", program]).stdout.split()
        return [path for path in files if f"/{Path(program).name}.dir/" in path and path.endswith(".o")], files

    def makes(self, output):
        """Runs the one command that makes this output, whatever Ninja thinks of its inputs."""
        self.save(output)
        return self.run(["sh", "-c", self.run(["ninja", "-t", "commands", "-s", output]).stdout]).returncode == 0

    def compiles(self, objects, files):
        """Compiles these objects. They read the headers that are precompiled otherwise: to precompile them for one object takes longer."""
        for path in files:
            if path.endswith(".gch"):
                self.save(path)
                (self.build / path).unlink(missing_ok=True)
        return all(self.makes(path) for path in objects)

    @contextlib.contextmanager
    def planted(self, edits):
        """The tree with these edits; then as it was, with its time stamps, and so are outputs that were built meanwhile."""
        files = {self.tree / file for file, _, _ in edits}
        before = {path: (path.read_bytes(), path.stat()) for path in files}
        built, self.saved = self.outputs(), set()
        try:
            for file, old, new in edits:
                text = (self.tree / file).read_text()
                place = matches(text, old)[0]
                (self.tree / file).write_text(text[:place.start()] + new + text[place.end():])
            yield
        finally:
            for path, (text, stat) in before.items():
                path.write_bytes(text)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            changed = {output for output, line in self.outputs().items() if built.get(output) != line}
            for output in self.saved | changed - {"build.ninja"}:
                path = self.build / output
                if output in self.saved:
                    os.replace(self.folder / "saved" / output, path)
                elif path.is_file():
                    path.unlink()
            self.saved = None
            if "build.ninja" in changed:
                self.refresh()

    def outcome(self, command, seconds, **variables):
        """Exit code and text of a test, with these variables in its environment. One that hangs is ended with all its processes, and fails."""
        environment = {"OMP_NUM_THREADS": "2", **os.environ, **variables}
        with tempfile.TemporaryFile() as log:
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.build, start_new_session=True)
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = 1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            log.seek(0)
            return code, log.read().decode(errors="replace")

    def passes(self, command, seconds=1200):
        """Does the test pass? A name of Catch2's may lack the type behind it."""
        for words in command, [*command[:-1], f"{command[-1]}*"]:
            code, text = self.outcome(words, seconds)
            if not re.search("No test cases matched|No tests ran", text):
                return code == 0
        sys.exit(f"no test has the name that {command} asks for")

    def seconds_of(self, command):
        """How long the test takes in a tree without a fault; None if it fails there."""
        if tuple(command) not in self.seconds:
            begin = time.monotonic()
            passes = self.passes(command)
            self.seconds[tuple(command)] = time.monotonic() - begin if passes else None
        return self.seconds[tuple(command)]


def program_of(row):
    """The first word of what the row names: a program or a test of CTest's."""
    words = SPAN.match(row.test)[1].split()
    return words[2] if words[:2] == ["ctest", "-R"] else words[0]


def command_of(row, copy):
    """The target to build, if any, and the command of the named test."""
    name, words = program_of(row), SPAN.match(row.test)[1].split()
    if under_mpirun := re.search(r"^`ranks_test` on (two|four) ranks", row.test):
        name += {"two": "_2", "four": "_4"}[under_mpirun[1]]
    if name.startswith("heed_") and name in copy.targets:
        return name, [copy.build / "bin" / name, *words[1:]]
    program = "heed_" + name
    if program in copy.targets and case_of(row):
        return program, [copy.build / "bin" / program, re.sub(r"([,\[])", r"\\\1", case_of(row))]
    target = program if program in copy.targets else TARGETS.get(name)
    mistakes = re.search(r"`, mistakes? (\d+)(?: and (\d+))?", row.test)
    only = ["env", "HEED_MISTAKES=" + ";".join(filter(None, mistakes.groups()))] if mistakes else []
    return target, [*only, "ctest", "--test-dir", copy.build, "-R", f"^{name}$", "--no-tests=error"]


def noticed_in_part(row, copy, program, command, seconds):
    """Does the test notice the fault where it is in the code of the test itself, as most faults in headers are, or else in the engine's?"""
    objects, files = copy.inputs(program)
    compiled = copy.compiles(objects, files)
    if row.at_compile_time or not compiled:
        return row.at_compile_time and not compiled
    parts = ["", *(file for file in files if file == "libheed_engine.a")]
    return any((not part or copy.builds(part)) and copy.makes(program) and not copy.passes(command, seconds) for part in parts)


def replay_row(row, copy):
    """In one word or two, what came of the row; empty if its test notices the fault."""
    if problem := problem_of(row, copy.tree):
        return problem
    target, command = command_of(row, copy)
    if target and not copy.builds(target):
        return f"{target} does not build without the fault: {copy.error()}"
    if (seconds := copy.seconds_of(command)) is None:
        return "the test fails without the fault"
    seconds = 60 + 10 * seconds
    with copy.planted(row.edits):
        program = f"bin/{target}"
        if all(file.parts[0] == "include" for file, _, _ in row.edits) and program in copy.outputs() and not row.sometimes:
            if noticed_in_part(row, copy, program, command, seconds):
                return ""
        built = not target or copy.builds(target)
        if row.at_compile_time or not built:
            return "" if row.at_compile_time and not built else "it builds" if built else f"it does not build: {copy.error()}"
        tries = 20 if row.sometimes else 1
        return "" if any(not copy.passes(command, seconds) for _ in range(tries)) else PASSES


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
        return replay_rows(by_program([known_rows[number] for number in numbers]))


def by_program(some_rows):
    """Rows of one program follow each other: it is built once without a fault."""
    return sorted(some_rows, key=program_of)


def part(some_rows, n, count):
    return some_rows[n * len(some_rows) // count:(n + 1) * len(some_rows) // count]


def replay_rows(all_rows):
    """Rows on as many copies of the tree as there are jobs. The first compiles what the others take from ccache."""
    jobs = min(len(all_rows), int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", os.cpu_count())))
    copies = [Copy(WORK / str(n)) for n in range(jobs)]
    for copy in copies:
        copy.refresh()
    copies[0].builds("heed_compiled", jobs=jobs)

    def replay_share(n):
        unnoticed = 0
        for row in part(all_rows, n, jobs):
            begin = time.monotonic()
            wrong = replay_row(row, copies[n])
            unnoticed += bool(wrong) and not (row.sometimes and wrong == PASSES)
            print(f"{row.number:>4}  {wrong or 'noticed'}, {time.monotonic() - begin:.0f} s", flush=True)
        return unnoticed

    with ThreadPoolExecutor(jobs) as pool:
        unnoticed = sum(pool.map(replay_share, range(jobs)))
    print(f"{len(all_rows) - unnoticed} faults noticed, {unnoticed} not")
    return int(bool(unnoticed))


def main(words):
    if words == ["check"]:
        return check()
    if len(words) > 1 and words[0] == "replay":
        return replay([int(word) for word in words[1:]])
    if len(words) == 3 and words[0] in ("draw", "share"):
        replayable, first, second = [row for row in rows().values() if row.edits], int(words[1]), int(words[2])
        chosen = random.Random(second).sample(replayable, first) if words[0] == "draw" else part(by_program(replayable), first, second)
        print(*(row.number for row in chosen))
        return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
