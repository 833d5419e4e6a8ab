#!/bin/sh
# Adds the agent to enroot and Pyxis containers. Install this file as /etc/enroot/hooks.d/50-gpumond.sh, and make it
# executable. It mounts the directories of the agent and the socket read-only, and sets the container's variables. To
# opt out, set GPUMOND_AGENT=0 in the job's or the image's environment.
set -eu
directory=${GPUMOND_AGENT_DIRECTORY:-/opt/gpumond-agent}
socket=${GPUMOND_SOCKET_DIRECTORY:-/run/gpumond}
inject=$directory/gpumond/agent/inject

[ "${GPUMOND_AGENT-}" != 0 ] || exit 0
[ -d "$inject" ] && [ -d "$socket" ] || exit 0
if [ -f "$ENROOT_ENVIRON" ] && grep -q '^GPUMOND_AGENT=0$' "$ENROOT_ENVIRON"; then exit 0; fi

for path in "$directory" "$socket"; do
  printf '%s %s none x-create=dir,bind,ro,nosuid,nodev\n' "$path" "$path" >> "$ENROOT_MOUNTS"
done

# The last line for a variable applies. The image's PYTHONPATH is kept, after the agent's directory.
prior=$(sed -n 's/^PYTHONPATH=//p' "$ENROOT_ENVIRON" 2> /dev/null | tail -n 1)
case ":$prior:" in
  *":$inject:"*) ;;
  *) printf 'PYTHONPATH=%s%s\n' "$inject" "${prior:+:$prior}" >> "$ENROOT_ENVIRON" ;;
esac
printf 'GPUMOND_AGENT=1\nGPUMOND_SOCKET=%s/agent.sock\n' "$socket" >> "$ENROOT_ENVIRON"
