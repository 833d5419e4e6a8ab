"""The terminal view. It requests one frame at a time from the daemon over HTTP.

``view`` (with ``rows`` and ``notices``) and ``ledger`` (with ``bars``) convert a frame to rows and lines. They are
pure, and the plain command line uses them, too. The other modules are textual widgets.
"""
