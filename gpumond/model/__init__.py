"""Values that flow through gpumond.

Bytes are integers, ratios run from 0 to 1, ``*_at`` is unix time, everything else is in base units. Unknown is None,
never 0. A process is identified by a ``ProcessKey``, since pids are reused; a device by its UUID. No module of this
package does I/O.
"""
