"""Import name of ``gpumond.agent.autostart`` in environments that an earlier version prepared."""

from gpumond.agent.autostart import start as start
