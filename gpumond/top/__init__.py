"""The terminal view. It requests one frame at a time from each daemon over HTTP.

``view`` (with ``rows`` and ``notices``), ``ledger`` (with ``bars``), ``groups``, ``processes`` and ``history`` convert
frames to rows and lines. They are pure, and the plain command line uses some of them, too. ``app`` contains the
application, ``terminal`` its input and output.
"""
