"""The drawings of docs/concepts.md, one SVG file each in docs/pictures.

python docs/drawings.py
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
Point = tuple[float, float]

STYLE = """
:root { color-scheme: light dark; }
svg { --surface: #ffffff; --ink: #16202c; --muted: #566272; --box: #e8f2fb; --edge: #0b5fa8; --other: #fdeee2;
  --other-edge: #d2560a; }
@media (prefers-color-scheme: dark) {
  svg { --surface: #18202a; --ink: #e9eef4; --muted: #a3b0bf; --box: #172b3e; --edge: #6cb4f0; --other: #3a2718;
    --other-edge: #f58a45; }
}
text { font: 14px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--ink); }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.muted { fill: var(--muted); }
.strong { font-weight: 600; }
.surface { fill: var(--surface); }
.box { fill: var(--box); stroke: var(--edge); stroke-width: 1.5; }
.other { fill: var(--other); stroke: var(--other-edge); stroke-width: 1.5; }
.frame { fill: none; stroke: var(--muted); stroke-width: 2; }
.line { fill: none; stroke: var(--muted); stroke-width: 1.5; }
.curve { fill: none; stroke: var(--edge); stroke-width: 2.5; }
.band { fill: var(--edge); fill-opacity: 0.2; stroke: none; }
.dot { fill: var(--edge); }
.arrow { marker-end: url(#head); }
#head path { fill: var(--muted); }
"""


@dataclass
class Drawing:
    """An SVG document that is drawn from back to front; lengths are in pixels."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "middle") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "box") -> None:
        """A rectangle with words in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words)

    def line(self, points: Sequence[Point], kind: str = "line") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{html.escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            f'<rect class="surface" width="{self.width}" height="{self.height}"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def virtual_shards() -> Drawing:
    drawing = Drawing("One global batch of eight virtual shards, dealt out to 1, 2, 3 and 8 workers", 720, 290)
    drawing.text(130 + 4 * 68, 26, "a global batch of 256 samples = 8 virtual shards of 32", "middle muted")
    for row, groups in enumerate(([8], [4, 4], [2, 3, 3], [1] * 8)):
        top, first = 48 + 60 * row, 0
        drawing.text(112, top + 28, f"{len(groups)} worker{'s' * (len(groups) > 1)}", "end strong")
        for worker, count in enumerate(groups):
            drawing.box(130 + 68 * first, top, 68 * count - 6, 46, kind="frame")
            for shard in range(first, first + count):
                drawing.box(136 + 68 * shard, top + 6, 50, 34, str(shard), "other" if worker % 2 else "box")
            first += count
    return drawing


def parity() -> Drawing:
    drawing = Drawing("Gradients of eight shards are added in one tree, on one worker and on two", 720, 320)
    places = [(90.0 + 77 * shard, 250.0) for shard in range(8)]
    for shard, (x, y) in enumerate(places):
        drawing.text(x, y + 44, f"shard {shard}", "middle muted")
    level = 0
    while len(places) > 1:
        parents = [((a[0] + b[0]) / 2, a[1] - 70) for a, b in zip(places[::2], places[1::2], strict=True)]
        for place, child in enumerate(places):
            drawing.line([child, parents[place // 2]])
        _sums(drawing, places, "g" if level == 0 else "+")
        places, level = parents, level + 1
    _sums(drawing, places, "+")
    drawing.text(60, 36, "worker 0", "strong")
    drawing.text(660, 36, "worker 1", "end strong")
    drawing.text(430, 36, "the sum", "muted")
    return drawing


def _sums(drawing: Drawing, places: Sequence[Point], words: str) -> None:
    """Boxes of one level of the tree; the right half is computed by the other worker."""
    for place, (x, y) in enumerate(places):
        is_other = len(places) > 1 and place >= len(places) / 2
        drawing.box(x - 24, y - 16, 48, 32, words, "other" if is_other else "box")


def aggregation() -> Drawing:
    drawing = Drawing("Three of the ways to sum gradients: all to one, a ring, and by node", 720, 260)
    for place, words in enumerate(("all_to_one", "ring", "hierarchical")):
        drawing.text(120 + 240 * place, 28, words, "middle strong")
    for number in range(3):
        left = 30.0 + 66 * number
        drawing.line([(left + 24, 176), (114 + 6 * number, 104)], "line arrow")
        drawing.box(left, 178, 48, 34, str(number + 1))
    drawing.box(96, 66, 48, 34, "0", "other")
    corners = [(308.0, 80.0), (412.0, 80.0), (412.0, 190.0), (308.0, 190.0)]
    for number, (x, y) in enumerate(corners):
        to_x, to_y = corners[(number + 1) % 4]
        along_x, along_y = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        start = (x + 25 * along_x, y + 18 * along_y)
        drawing.line([start, (to_x - 27 * along_x, to_y - 20 * along_y)], "line arrow")
        drawing.box(x - 24, y - 17, 48, 34, str(number))
    for node in range(2):
        left = 484 + 116 * node
        drawing.box(left, 58, 104, 158, kind="frame")
        drawing.text(left + 52, 238, f"node {node}", "middle muted")
        for worker in range(2):
            drawing.box(left + 28, 72 + 92 * worker, 48, 34, str(2 * node + worker), "other" if worker == 0 else "box")
        drawing.line([(left + 52, 162), (left + 52, 109)], "line arrow")
    drawing.line([(561, 89), (626, 89)], "line arrow")
    return drawing


def mesh() -> Drawing:
    drawing = Drawing("The mesh fsdp2 x tp2: four workers along two axes", 720, 270)
    for rank in range(4):
        x, y = 250 + 230 * (rank % 2), 60 + 106 * (rank // 2)
        drawing.box(x, y, 170, 62, kind="other" if rank // 2 else "box")
        drawing.text(x + 85, y + 26, f"worker {rank}", "middle strong")
        drawing.text(x + 85, y + 46, f"shard {rank // 2} of slice {rank % 2}", "middle muted")
    for row in range(2):
        drawing.line([(420, 91 + 106 * row), (478, 91 + 106 * row)], "line arrow")
    for column in range(2):
        drawing.line([(335 + 230 * column, 122), (335 + 230 * column, 164)], "line arrow")
    drawing.text(450, 40, "axis tp: slices of every layer")
    drawing.text(228, 140, "axis fsdp:", "end")
    drawing.text(228, 160, "shards of parameters", "end")
    return drawing


def checkpoints() -> Drawing:
    drawing = Drawing(
        "Training pauses for a copy in memory; files are written beside it, and the manifest last", 720, 220
    )
    drawing.text(110, 72, "training", "end strong")
    drawing.text(110, 142, "writing", "end strong")
    for step in range(8):
        drawing.box(130 + 66 * step + (26 if step > 1 else 0), 50, 60, 34, f"{119 + step}")
    drawing.box(262, 50, 20, 34, kind="other")
    drawing.line([(272, 86), (272, 116)], "line arrow")
    drawing.box(262, 120, 250, 34, "files of step 120")
    drawing.box(516, 120, 80, 34, "manifest", "other")
    drawing.text(272, 38, "copy in memory", "middle muted")
    drawing.text(386, 182, "killed here: the checkpoint before is used", "middle muted")
    drawing.text(606, 142, "complete", "strong")
    return drawing


def noise_scale() -> Drawing:
    drawing = Drawing("Efficiency of a batch falls to one half at the noise scale", 720, 280)
    left, right, top, bottom = 90.0, 680.0, 30.0, 220.0

    def place(ratio: float) -> Point:
        share = (math.log10(ratio) + 2) / 4
        return left + share * (right - left), bottom - (bottom - top) / (1 + ratio)

    drawing.line([(left, top), (left, bottom), (right, bottom)])
    drawing.line([place(10 ** (-2 + 4 * step / 80)) for step in range(81)], "curve")
    x, y = place(1.0)
    drawing.line([(x, bottom), (x, y), (left, y)])
    drawing.dot(x, y)
    drawing.text(x + 14, y - 8, "at the noise scale a sample is worth half", "")
    for ratio, words in (
        (0.01, "1/100"),
        (0.1, "1/10"),
        (1.0, "noise scale"),
        (10.0, "10 times"),
        (100.0, "100 times"),
    ):
        drawing.text(place(ratio)[0], bottom + 22, words, "middle muted")
    for share in (0.0, 0.5, 1.0):
        drawing.text(left - 10, bottom - share * (bottom - top) + 5, f"{share:.0%}", "end muted")
    drawing.text((left + right) / 2, bottom + 48, "samples of the global batch (logarithmic)")
    return drawing


def forecast() -> Drawing:
    drawing = Drawing("A forecast with its 90 % prediction interval, which widens beyond what was measured", 720, 280)
    left, right, top, bottom = 90.0, 680.0, 30.0, 220.0

    def place(devices: int, speedup: float) -> Point:
        return left + math.log2(devices) / 6 * (right - left), bottom - math.log2(speedup) / 6 * (bottom - top)

    counts = [2**power for power in range(7)]
    speedups = {count: count / (1 + 0.02 * (count - 1)) for count in counts}
    spread = {count: 0.02 * max(1.0, math.log2(count)) * (1 if count <= 4 else count / 8) for count in counts}
    high = [place(count, speedups[count] * (1 + min(0.45, spread[count]))) for count in counts]
    low = [place(count, speedups[count] * (1 - min(0.45, spread[count]))) for count in counts]
    drawing.line([*high, *reversed(low)], "band")
    drawing.line([(left, top), (left, bottom), (right, bottom)])
    drawing.line([place(count, speedups[count]) for count in counts], "curve")
    for count in (1, 2, 4):
        drawing.dot(*place(count, speedups[count]))
    for count in counts:
        drawing.text(place(count, 1)[0], bottom + 22, str(count), "middle muted")
        drawing.text(left - 10, place(1, count)[1] + 5, f"{count}x", "end muted")
    drawing.text(120, 60, "dots: measured", "muted")
    drawing.text(120, 80, "line and area: forecast and 90 % prediction interval", "muted")
    drawing.text((left + right) / 2, bottom + 48, "devices")
    return drawing


DRAWINGS = {
    "virtual-shards": virtual_shards,
    "parity": parity,
    "aggregation": aggregation,
    "mesh": mesh,
    "checkpoints": checkpoints,
    "noise-scale": noise_scale,
    "forecast": forecast,
}
"""By the name of the file."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
