#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The house rules a script can check. Prints FILE:LINE: what is wrong; exits 1 if anything is.

    every source starts with an SPDX line; a C file opens with a comment that says what it is for
    100 columns, no tabs, no trailing blanks, a newline at the end
    includes go one way (see LAYERS)
    only the daemon's log.c and command-line tools print
    no TODO, FIXME, XXX, HACK; no `#if 0`
    no cudaMemcpy*() or cudaMemset*() but the ...Async() ones, out of tests and graphs/cuda/memory.c, which
        waits: they may return first, and the engine's streams do not wait for them
    functions stay under FUNCTION_LINES lines
"""
import re
import subprocess
import sys

LAYERS = {  # folder -> folders of ours it may include from
    "shm_protocol": {"shm_protocol"},
    "kernels": {"kernels"},
    "graphs": {"graphs", "kernels"},
    "daemon": {"daemon", "graphs", "kernels", "shm_protocol", "telemetry"},
    "telemetry": {"telemetry"},
    "clients": {"clients", "shm_protocol"},
}
# The bench measures kernels in its own process; the replay asks kernels/geometry.c what is served.
EXCEPTIONS = {("clients/bench", "graphs"), ("clients/bench", "kernels"), ("clients/replay", "kernels")}
FUNCTION_LINES = 70
PRINTS = re.compile(r"\b(printf|fprintf|puts|perror|vfprintf|putchar)\s*\(")
MAY_PRINT = re.compile(r"^(clients/(replay|ctl|bench|examples|common)/|daemon/(log|main|options)\.c|tests/)")
LATE = re.compile(r"\bcudaMem(cpy|set)(?!\w*Async)\w*\(")
MAY_BE_LATE = re.compile(r"^(graphs/cuda/memory\.c|tests/)")  # memory.c waits; tests run on the stream that waits
problems = []


def say(path, line, text):
    problems.append(f"{path}:{line}: {text}")


def files(*patterns):
    return subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split()


def layer_of(path):
    return path.split("/")[0]


def check_includes(path, number, line, folders):
    found = re.match(r'\s*#include "([^"]+)"', line)
    if not found or layer_of(path) not in LAYERS:
        return
    name = found.group(1).split("/")[-1]
    for target in folders.get(name, ()):
        if target in LAYERS[layer_of(path)]:
            return
    for target in folders.get(name, ()):
        if any(path.startswith(at) and target == to for at, to in EXCEPTIONS):
            return
        say(path, number, f"{layer_of(path)} must not include {found.group(1)} of {target}")
        return


def check_functions(path, lines):
    start = None  # the last line that begins at the margin; "}" alone ends a function, "};" all else
    for number, line in enumerate(lines, 1):
        if line == "}":
            if number - start > FUNCTION_LINES:
                say(path, start, f"a function of {number - start} lines (at most {FUNCTION_LINES})")
        elif line and line[0] not in " #/":
            start = number


def check_source(path, folders):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    lines = text.split("\n")
    head = "\n".join(lines[:3])
    if "SPDX-License-Identifier: MIT" not in head:
        say(path, 1, "no SPDX line")
    if not text.endswith("\n") or text.endswith("\n\n"):
        say(path, len(lines), "does not end with one newline")
    c = path.endswith((".c", ".h", ".cu", ".cuh"))
    if c and not any(line.startswith(("/*", "//")) for line in lines[1:4]):
        say(path, 2, "does not open by saying what it is for")
    for number, line in enumerate(lines, 1):
        if c and len(line) > 100:
            say(path, number, f"{len(line)} columns")
        if c and "\t" in line:
            say(path, number, "tab")
        if line != line.rstrip():
            say(path, number, "trailing blank")
        if path != "tests/tools/house.py" and re.search(r"\b(TODO|FIXME|XXX|HACK)\b|^#if 0", line):
            say(path, number, "unfinished")
        if c:
            check_includes(path, number, line, folders)
            if LATE.search(line) and not MAY_BE_LATE.match(path):
                say(path, number, "may return before it is done: give it the stream that needs it")
            if PRINTS.search(line) and not MAY_PRINT.match(path):
                say(path, number, "prints: only the daemon's log and the tools do")
    if c:
        check_functions(path, lines)


def main():
    sources = files("*.c", "*.h", "*.cu", "*.cuh", "*.py", "*.sh", "Makefile")
    folders = {}
    for path in sources:
        folders.setdefault(path.split("/")[-1], set()).add(layer_of(path))
    for path in sources:
        check_source(path, folders)
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
