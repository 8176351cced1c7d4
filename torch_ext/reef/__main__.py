"""``python -m reef``: where the package is, and whether it fits this machine."""

from __future__ import annotations

import argparse

import reef

from . import doctor


def main(words: list[str] | None = None) -> int:
    """Runs the command line `words`, by default the process's, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m reef", description=__doc__)
    parser.add_argument("--version", action="store_true", help="print Reef's version")
    parser.add_argument("--cmake-dir", action="store_true", help="print the folder for CMake's Reef_ROOT")
    parser.add_argument("--include-dir", action="store_true", help="print the folder that holds reef/reef.h")
    parser.add_argument("--retry-library", action="store_true", help="print the library to preload for system calls")
    commands = parser.add_subparsers(dest="command")
    check = commands.add_parser("doctor", help="check versions and run one real training step")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(words)
    if arguments.version:
        print(reef.__version__)
    elif arguments.cmake_dir:
        print(reef.cmake_dir())
    elif arguments.include_dir:
        print(reef.include_dir())
    elif arguments.retry_library:
        print(reef.retry_library())
    elif arguments.command == "doctor":
        return doctor.run(as_json=arguments.json)
    else:
        parser.print_help()
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
