#!/bin/sh
# The agent in containers of enroot and Pyxis: install it as /etc/enroot/hooks.d/50-gpumond.sh, executable. It mounts the
# directories of the agent and of its socket read-only, and sets the variables of the container. GPUMOND_AGENT=0 in the
# environment of the job or of the image opts out.
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

# The last line of a variable applies. PYTHONPATH of the image remains, after the agent's directory.
prior=$(sed -n 's/^PYTHONPATH=//p' "$ENROOT_ENVIRON" 2> /dev/null | tail -n 1)
case ":$prior:" in
  *":$inject:"*) ;;
  *) printf 'PYTHONPATH=%s%s\n' "$inject" "${prior:+:$prior}" >> "$ENROOT_ENVIRON" ;;
esac
printf 'GPUMOND_AGENT=1\nGPUMOND_SOCKET=%s/agent.sock\n' "$socket" >> "$ENROOT_ENVIRON"
