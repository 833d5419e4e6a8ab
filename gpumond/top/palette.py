"""The colours of the shares: the same on the page, in the terminal and in Grafana.

Any two are apart for all eyes: at least 0.12 in OKLab as they are and as protanopes, deuteranopes and tritanopes see
them (Machado 2009). No face relies on colour alone: a share's name and bytes stand beside it.
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
"""Of ``free`` on a dark ground, where it is the ground of the bar."""
