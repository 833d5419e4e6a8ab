"""The terminal view: one frame of the daemon at a time, asked for over HTTP.

``view`` (of ``rows`` and ``remarks``) and ``ledger`` (of ``bars``) turn a frame into what is shown; they are pure, and
serve the plain command line, too. The other files put it on the screen, with textual.
"""
