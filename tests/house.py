#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How large and how dear is the house? Prints figures that grow unseen.

house.py sizes                                   lines, files, longest function, beside BUDGETS; exit 1 if one is exceeded
house.py arrows                                  headers that include what their room must not, by ARROWS; exit 1 if there is one
house.py way FOLDER COMPILER FLAG...             headers and types that one forward call of plain attention passes
house.py costs FOLDER COMPILER FLAG...           what files that call heed cost a compiler, beside COSTS; exit 1 if one is exceeded
house.py library FOLDER COMPILER FLAG... FILE... what the source files of heed::compiled cost together

FOLDER takes the files that are compiled; the flags name the include folder of heed.
"""
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
DOORS = "heed/engine/doors.hpp"  # both calls of one op, header-only
BESIDE_ENGINE = "heed/compiled_engine.hpp"  # the same for programs that link the engine's code

# What no change may exceed. Whoever makes the house lighter lowers a number.
BUDGETS = {
    "lines of engine/": 13746,
    "longest header of engine/, lines": 560,
    "longest function, lines": 60,
    "files behind one op, both ways": 108,
    "lines behind one op, both ways": 18895,
    "lines behind one op beside heed::engine": 11440,
    "files behind heed/attention.hpp": 143,
    "lines behind heed/attention.hpp": 24249,
    "lines of all headers": 52044,
    "lines of README.md": 150,
}

# What a file may cost a compiler, in times of `#include <Eigen/Core>`: a tenth more than g++ 12 took at -O2 on a Zen 4.
COSTS = {
    "heed/ops/scaled_dot.hpp": 0.65,
    "heed/attention.hpp": 2.1,
    "both ways header-only: dar": 14.5,
    "both ways beside the engine: dar": 3.1,
    "both ways beside the engine: a user's own score": 2.0,
    "explain() beside heed::compiled: dar": 2.25,
}

# Which rooms the headers of a room may include beside their own. "doors" are the headers beside the rooms, which may include any.
ARROWS = {
    "core": "",
    "simd": "core",
    "autodiff": "core simd",
    "mask": "core simd",
    "plug": "core simd autodiff",
    "ops": "core simd plug",
    "engine/tile": "core simd mask plug",
    "engine": "core simd autodiff mask plug engine/tile",
    "decode": "core simd engine",
    "reference": "core simd autodiff mask plug",
    "check": "core simd autodiff plug engine reference",
    "measure": "core simd mask plug engine ops",
    "nn": "core simd engine decode ops",
    "models": "doors io measure nn ops reference",
    "io": "core",
    "mpi": "core mask engine nn",
    "c": "core simd mask plug engine io decode doors",
}
# Which rooms may include a header that heed does not own.
FOREIGN = {"mpi.h": "mpi", "nlohmann/json.hpp": "io", "filesystem": "io models", "fstream": "io models"}


def lines(path):
    return path.read_text().splitlines()


def closure(*headers):
    """Every header of heed that these headers include, with themselves."""
    seen, waiting = set(), list(headers)
    while waiting:
        header = waiting.pop()
        if header not in seen:
            seen.add(header)
            waiting += re.findall(r"^#include <(heed/[^>]+)>", (INCLUDE / header).read_text(), re.M)
    return [INCLUDE / header for header in seen]


def room_of(header):
    """The room of heed/ROOM/... ; caches and pools, whose headers stand beside the rooms, are a room, too."""
    room = header.removeprefix("heed/").rpartition("/")[0]
    return room if room in ARROWS else room.partition("/")[0] or ("decode" if "/kv_" in header else "doors")


def print_arrows():
    wrong = []
    for path in sorted(INCLUDE.rglob("*.h*")):
        room = room_of(path.relative_to(INCLUDE).as_posix())
        for number, line in enumerate(lines(path), 1):
            included = re.match(r"#include <([^>]+)>", line)
            if not included or room == "doors":
                continue
            header = included[1]
            if header.startswith("heed/"):
                fits = room_of(header) in [room, *ARROWS[room].split()]
            else:
                fits = room in FOREIGN.get(header, room).split()
            if not fits:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {room}/ must not include <{header}>")
    print("\n".join(wrong) or f"{len(ARROWS)} rooms include what they may")
    return int(bool(wrong))


def longest_block(path):
    """Lines of the longest function. clang-format closes a function with a lone brace in the column where its declaration
    began, and indents all between; classes close with `};`, namespaces with a comment, and inner blocks are shorter."""
    longest, last = 0, {}  # last: the newest line that begins in a column
    for number, line in enumerate(lines(path)):
        text = line.lstrip()
        column = len(line) - len(text)
        if text == "}":
            longest = max(longest, number - last[column] + 1)
        if text and text[0] != "#":
            last[column] = number
    return longest


def sizes():
    headers = sorted(INCLUDE.rglob("*.h*"))
    engine = [path for path in headers if (INCLUDE / "heed/engine") in path.parents]
    one_op = closure(DOORS, "heed/ops/scaled_dot.hpp")
    attention = closure("heed/attention.hpp")
    count = lambda paths: sum(len(lines(path)) for path in paths)
    return {
        "lines of engine/": count(engine),
        "longest header of engine/, lines": max(len(lines(path)) for path in engine),
        "longest function, lines": max(map(longest_block, headers)),
        "files behind one op, both ways": len(one_op),
        "lines behind one op, both ways": count(one_op),
        "lines behind one op beside heed::engine": count(closure(BESIDE_ENGINE, "heed/ops/scaled_dot.hpp")),
        "files behind heed/attention.hpp": len(attention),
        "lines behind heed/attention.hpp": count(attention),
        "lines of all headers": count(headers),
        "lines of README.md": len(lines(ROOT / "README.md")),
    }


def print_sizes():
    exceeded = False
    print(f"{'':<42} {'now':>7} {'budget':>7}")
    for name, size in sizes().items():
        over = size > BUDGETS[name]
        exceeded |= over
        print(f"{name:<42} {size:>7,} {BUDGETS[name]:>7,}{'  exceeded' if over else ''}")
    return int(exceeded)


# Prints the address of each function that a forward call enters.
WAY = """
#include <heed/attention.hpp>
#include <cstdio>
#include <vector>
#define UNTRACED extern "C" __attribute__((no_instrument_function)) void
static bool recording = false;
UNTRACED __cyg_profile_func_enter(void* function, void*) { if (recording) std::printf("%p\\n", function); }
UNTRACED __cyg_profile_func_exit(void*, void*) {}
int main() {
  const heed::ScaledDot<float> op;
  std::vector<float> numbers(2 * 64 * 32, 0.5F), mixed(numbers.size());
  const heed::TensorView<const float> in(numbers.data(), {1, 2, 64, 32});
  recording = true;
  heed::forward(op, {in, in, in}, heed::causal<float>(), heed::TensorView<float>(mixed.data(), {1, 2, 64, 32}));
  recording = false;
}
"""


def class_of(function):
    """The class of a member function by its demangled name; heed's classes begin with a capital, its namespaces do not."""
    inner = r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}"
    function = re.sub(r"operator(\(\)|<|->)", "operator", function)
    while re.search(inner, function):
        function = re.sub(inner, "", function)
    qualified = [word for word in function.split() if word.startswith("heed::")]
    names = [name for name in qualified[-1].split("::")[:-1] if name[:1].isupper()] if qualified else []
    return "::".join(dict.fromkeys(names))


def print_way(folder, command):
    """A call is traced in a program without optimisation, in which every function of heed reports that it is entered."""
    source, program = folder / "way.cpp", folder / "way"
    source.write_text(WAY)
    flags = ["-O0", "-g1", "-no-pie", "-finstrument-functions"]
    subprocess.run([*command, *flags, source, "-o", program], check=True)
    addresses = subprocess.run([program], env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True).stdout
    named = subprocess.run(["addr2line", "-Cfe", program], input="\n".join(sorted(set(addresses.split()))),
                           capture_output=True, text=True, check=True).stdout.splitlines()
    entered = [(class_of(name), place.split(":")[0].split("/include/")[1]) for name, place in zip(named[::2], named[1::2])
               if "/include/heed/" in place]
    for room in "heed/engine/", "heed/":
        headers = {header for _, header in entered if header.startswith(room)}
        types = {name for name, header in entered if name and header.startswith(room)}
        print(f"plain attention's way forward, {room:<13} {len(headers):>3} headers {len(types):>3} types")


OWN_SCORE = """
#include <heed/plug/own_score.hpp>
template <class T>
struct Recency {
  heed::Param<T> slope = T(1);
  static constexpr auto parameters = std::tuple{heed::named("slope", &Recency::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const { return pair.logit - p[0] * heed::distance(pair); }
};
"""
SDPA = ("#include <heed/ops/scaled_dot.hpp>\n", "heed::ScaledDot<float>")
DAR = ("#include <heed/ops/dar.hpp>\n", "heed::Dar<float>")
DIFFERENTIAL = ("#include <heed/ops/differential.hpp>\n", "heed::Differential<float>")
OWN = (OWN_SCORE, "heed::OwnAttention<Recency, float>")


def both_ways(door, *ops):
    """A file that calls these ops, forward and backward."""
    text = f"#include <{door}>\n" + "".join(head for head, _ in ops)
    for number, (_, op) in enumerate(ops):
        text += f"""
void both_{number}(const {op}& op, const heed::Inputs<float>& in, const heed::TensorView<float>& out,
                   heed::Saved<float>& saved, const heed::Gradients<float>& grads, {op}& grad_op) {{
  heed::forward(op, in, heed::causal<float>(), out, &saved);
  const heed::TensorView<const float> read(out);
  heed::backward(op, in, heed::causal<float>(), saved, read, read, grads, &grad_op);
}}
"""
    return text


def median_cost(folder, command, text, repeats=3):
    """User seconds and megabytes of memory of one compilation."""
    source = folder / "unit.cpp"
    source.write_text(text)
    seconds, memory = [], []
    for _ in range(repeats):
        child = subprocess.Popen([*command, "-c", source, "-o", folder / "unit.o"])
        _, status, used = os.wait4(child.pid, 0)
        if status != 0:
            sys.exit(f"{command[0]} failed at {source}")
        seconds.append(used.ru_utime)
        memory.append(used.ru_maxrss / 1024)
    return statistics.median(seconds), statistics.median(memory)


def print_costs(folder, command):
    """What a file costs beyond `#include <Eigen/Core>`, the measure of a machine."""
    eigen, _ = median_cost(folder, [*command, "-O2"], "#include <Eigen/Core>\n")
    print(f"{'user seconds of one file, medians of three':<52} {'all':>6} {'over Eigen/Core':>16} {'MB':>5}")
    print(f"{'<Eigen/Core>':<52} {eigen:>6.2f}")

    held = 0

    def show(name, text, flag="-O2"):
        nonlocal held
        seconds, memory = median_cost(folder, [*command, flag], text)
        said, budget = "", COSTS.get(name)
        if budget:
            fits = seconds <= budget * eigen
            held += fits
            said = f"   {seconds / eigen:.2f} of {budget:.2f} Eigen/Core" + ("" if fits else ": exceeded")
        print(f"{name:<52} {seconds:>6.2f} {seconds - eigen:>16.2f} {memory:>5.0f}{said}", flush=True)
        return seconds

    show("<string> <vector> <algorithm> <cmath>", "#include <string>\n#include <vector>\n#include <algorithm>\n#include <cmath>\n")
    for header in sorted((INCLUDE / "heed/ops").glob("*.hpp")):
        show(f"heed/ops/{header.name}", f"#include <heed/ops/{header.name}>\n")
    show("heed/attention.hpp", "#include <heed/attention.hpp>\n")
    show("both ways from heed/compiled.hpp: dar", both_ways("heed/compiled.hpp", DAR))
    show("both ways header-only at -O0: dar", both_ways(DOORS, DAR), "-O0")
    for name, door in ("header-only", DOORS), ("beside the engine", BESIDE_ENGINE):
        alone = show(f"both ways {name}: sdpa", both_ways(door, SDPA))
        show(f"both ways {name}: dar", both_ways(door, DAR))
        show(f"both ways {name}: a user's own score", both_ways(door, OWN))
        for further, op in ("dar", DAR), ("differential", DIFFERENTIAL), ("own score", OWN):
            total = show(f"both ways {name}: sdpa and {further}", both_ways(door, SDPA, op))
            print(f"{'  a further op in the same file: ' + further:<52} {total - alone:>6.2f}")
    show("explain() beside heed::compiled: dar",
         f"#include <heed/compiled.hpp>\n#include <heed/explain.hpp>\n{DAR[0]}"
         f"heed::Explanation of(const {DAR[1]}& op, const heed::Geometry& g) {{ return heed::explain(op, g); }}\n")
    print(f"{held} of {len(COSTS)} costs hold")
    return 0 if held == len(COSTS) else 1


def print_library(folder, command):
    sources = [Path(word) for word in command if word.endswith(".cpp")]
    command = [word for word in command if not word.endswith(".cpp")] + ["-O3", "-DNDEBUG"]
    eigen, _ = median_cost(folder, command, "#include <Eigen/Core>\n")
    total = sum(median_cost(folder, command, source.read_text(), 1)[0] for source in sources)
    print(f"heed::compiled, all variants: {total:.0f} user seconds, {total - len(sources) * eigen:.0f} over Eigen/Core")


def main(words):
    if words == ["sizes"]:
        return print_sizes()
    if words == ["arrows"]:
        return print_arrows()
    commands = {"way": print_way, "costs": print_costs, "library": print_library}
    if len(words) < 3 or words[0] not in commands:
        sys.exit(__doc__)
    folder = Path(words[1])
    folder.mkdir(parents=True, exist_ok=True)
    return commands[words[0]](folder, words[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
