"""Colours of the shares: the same on the page, in the terminal and in Grafana.

Any two differ by at least 0.12 in OKLab, both unchanged and as simulated for protanopia, deuteranopia and tritanopia
(Machado 2009). No view relies on colour alone: each share is shown with its name and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, str] = {
    "live": "#1857B8",
    "cached": "#3FBAA9",
    "stranded": "#FFB71E",
    "overhead": "#9972E6",
    "opaque": "#855A6C",
    "unclaimed": "#E9660B",
    "free": "#DDE1E6",
}

FREE_ON_DARK = "#2E343D"
"""Colour of ``free`` on a dark background, where it is the background of the bar."""
