"""A compiler launcher that takes objects from another build where it has compiled the same source by the same command.

    known_objects.py objects.json compiler argument...

Two commands are the same if they differ only in where the sources, the build folder and the outputs lie, and what CMake
has generated for them has the same text. All else is compiled. `describe` writes the file objects.json.
"""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

OUTPUTS = ("-o", "-MF", "-MT", "-MQ")  # each followed by a path
LAUNCHERS = ("ccache",)  # what may stand in front of the compiler


class Place:
    """Where a build lies: its folder and its sources' folder. Writes paths in them without saying where that is."""

    def __init__(self, build, sources):
        self.build, self.sources = str(build), str(sources)

    def without(self, text):
        return text.replace(self.build, "<build>").replace(self.sources, "<sources>")

    def command(self, words):
        """The words but for launchers, outputs and files of dependencies, and the texts of what has been generated."""
        while os.path.basename(words[0]) in LAUNCHERS:
            words = words[1:]
        kept = [word for before, word in zip(["", *words], words, strict=False)
                if word not in (*OUTPUTS, "-MD") and before not in OUTPUTS]
        generated = [self.without(Path(word).read_text()) for word in kept
                     if word.startswith(self.build) and Path(word).is_file()]
        return [self.without(word) for word in kept] + generated


def output(words):
    return words[words.index("-o") + 1]


def describe(build, sources, other_build, other_sources, file):
    """Writes the objects of the build folder `build` into `file`, for a build of a copy of its sources elsewhere."""
    here = Place(build, sources)
    objects = {}
    for entry in json.loads((Path(build) / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        objects[here.without(entry["file"])] = {"command": here.command(words), "object": str(Path(build) / output(words))}
    Path(file).write_text(json.dumps({"build": str(other_build), "sources": str(other_sources), "objects": objects}))


def known(words, description):
    """The object that compiling by this command would give, or None."""
    here = Place(description["build"], description["sources"])
    found = description["objects"].get(here.without(words[-1]))
    if found and found["command"] == here.command(words) and os.path.exists(found["object"]):
        return found["object"]
    return None


def main():
    words = sys.argv[2:]
    found = known(words, json.loads(Path(sys.argv[1]).read_text())) if "-c" in words else None
    if not found:
        os.execvp(words[0], words)
    shutil.copyfile(found, output(words))
    if "-MF" in words:
        Path(words[words.index("-MF") + 1]).write_text(f"{output(words)}: {words[-1]}\n")


if __name__ == "__main__":
    main()
