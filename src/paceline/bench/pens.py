"""Two ways to draw the same lines: SVG, written here, and PNG, through Pillow (the extra `bench`).

Charts are drawn once, with a `Pen`, and both files show the same picture; nothing needs a browser or fonts
of the system. Coordinates are pixels from the top left. Knows nothing of axes or data.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

Point: TypeAlias = tuple[float, float]
Anchor: TypeAlias = Literal["start", "middle", "end"]
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_OVERSAMPLING = 2  # of PNGs: drawn larger and reduced, since Pillow draws hard edges
_IN_ASCII = str.maketrans({"−": "-", "–": "-", "×": "x", "…": "."})


class Pen(Protocol):
    """Draws."""

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None:
        """A line through points."""
        ...

    def dot(self, centre: Point, radius: float, colour: str, title: str = "") -> None:
        """A filled circle; `title` shows where pictures can be pointed at."""
        ...

    def box(self, corner: Point, size: Point, fill: str) -> None:
        """A filled rectangle."""
        ...

    def text(
        self, at: Point, text: str, size: float = 12, colour: str = "#222", anchor: Anchor = "start"
    ) -> None:
        """One line of text; `at` is on its baseline."""
        ...


class SvgPen:
    """Collects SVG elements."""

    def __init__(self, width: float, height: float) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None:
        """See `Pen`."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
            f'stroke-linejoin="round" stroke-linecap="round"{dashes}/>'
        )

    def dot(self, centre: Point, radius: float, colour: str, title: str = "") -> None:
        """See `Pen`."""
        shown = f"<title>{escape(title)}</title>" if title else ""
        (x, y) = centre
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}">{shown}</circle>'
        )

    def box(self, corner: Point, size: Point, fill: str) -> None:
        """See `Pen`."""
        self._parts.append(
            f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" '
            f'fill="{fill}"/>'
        )

    def text(
        self, at: Point, text: str, size: float = 12, colour: str = "#222", anchor: Anchor = "start"
    ) -> None:
        """See `Pen`."""
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size:g}" fill="{colour}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def to_svg(self) -> str:
        """The picture."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="{FONT}">{"".join(self._parts)}</svg>'
        )


class PngPen:
    """Draws on a white bitmap.

    Args:
        scale: pixels of the file for each of the drawing's.

    Raises:
        PacelineError: Pillow is not installed.
    """

    def __init__(self, width: float, height: float, scale: int = 2) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise PacelineError("a PNG needs Pillow: pip install 'paceline[bench]'") from None
        self._size = (round(width * scale), round(height * scale))
        self._factor = scale * _OVERSAMPLING
        self._image = Image.new(
            "RGB", (self._size[0] * _OVERSAMPLING, self._size[1] * _OVERSAMPLING), "white"
        )
        self._draw = ImageDraw.Draw(self._image)
        self._fonts: dict[float, FreeTypeFont] = {}

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None:
        """See `Pen`."""
        for stroke in _dashes(points) if dash else [points]:
            scaled = [self._scaled(point) for point in stroke]
            self._draw.line(scaled, fill=colour, width=max(1, round(width * self._factor)), joint="curve")

    def dot(self, centre: Point, radius: float, colour: str, title: str = "") -> None:
        """See `Pen`."""
        (x, y), r = self._scaled(centre), radius * self._factor
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def box(self, corner: Point, size: Point, fill: str) -> None:
        """See `Pen`."""
        (x, y), (width, height) = self._scaled(corner), self._scaled(size)
        self._draw.rectangle((x, y, x + width, y + height), fill=fill)

    def text(
        self, at: Point, text: str, size: float = 12, colour: str = "#222", anchor: Anchor = "start"
    ) -> None:
        """See `Pen`."""
        place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        shown = text.translate(_IN_ASCII)  # the font that Pillow carries has little else
        self._draw.text(self._scaled(at), shown, fill=colour, font=self._font(size), anchor=place)

    def to_png(self) -> bytes:
        """The picture."""
        from PIL.Image import Resampling

        buffer = io.BytesIO()
        self._image.resize(self._size, Resampling.LANCZOS).save(buffer, "PNG", optimize=True)
        return buffer.getvalue()

    def _scaled(self, point: Point) -> Point:
        return point[0] * self._factor, point[1] * self._factor

    def _font(self, size: float) -> FreeTypeFont:
        if size not in self._fonts:
            from PIL import ImageFont

            font = ImageFont.load_default(size * self._factor)
            if not isinstance(font, ImageFont.FreeTypeFont):
                raise PacelineError("a PNG needs a Pillow that was built with FreeType")
            self._fonts[size] = font
        return self._fonts[size]


def _dashes(points: Sequence[Point], length: float = 5.0, gap: float = 4.0) -> list[list[Point]]:
    """A line cut into strokes of this length; the pattern goes on around corners."""
    strokes: list[list[Point]] = []
    left, is_on, current = length, True, [points[0]]
    for begin, end in itertools.pairwise(points):
        span = ((end[0] - begin[0]) ** 2 + (end[1] - begin[1]) ** 2) ** 0.5
        done = 0.0
        while span - done > left:
            done += left
            share = done / span
            cut = (begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1]))
            if is_on:
                strokes.append([*current, cut])
            is_on, current, left = not is_on, [cut], gap if is_on else length
        left -= span - done
        current.append(end)
    if is_on and len(current) > 1:
        strokes.append(current)
    return strokes
