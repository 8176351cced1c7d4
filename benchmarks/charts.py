"""Charts of what benchmarks have measured: one SVG for each name that points have as their chart."""

from __future__ import annotations

import re
from pathlib import Path


def draw(points: list[dict], folder: Path) -> list[str]:
    """Of {"chart", "series", "x_name", "x", "y_name", "y"}. Gives the lines of Markdown that
    show them, none without matplotlib."""
    charts: dict[str, list[dict]] = {}
    for point in points:
        charts.setdefault(point["chart"], []).append(point)
    if not charts:
        return []
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "reef", "svg.fonttype": "none", "font.family": "sans-serif"})
    folder.mkdir(exist_ok=True)
    return [show(name, of, folder) for name, of in charts.items()]


def show(name: str, points: list[dict], folder: Path) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for series in dict.fromkeys(point["series"] for point in points):
        of = sorted((point["x"], point["y"]) for point in points if point["series"] == series)
        axes.plot(*zip(*of, strict=True), marker="o", markersize=4, label=series)
    axes.set(title=name, xlabel=points[0]["x_name"], ylabel=points[0]["y_name"])
    if points[0].get("scale") == "log":
        axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    file = folder / (re.sub(r"\W+", "_", name).strip("_").lower() + ".svg")
    figure.savefig(file, metadata={"Date": None})
    return f"![{name}]({folder.name}/{file.name})"
