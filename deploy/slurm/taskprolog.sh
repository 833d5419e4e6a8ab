#!/bin/sh
# Adds the agent to Slurm tasks with GPUs. Install this file as /etc/slurm/gpumond-taskprolog.sh, make it executable,
# and set TaskProlog=/etc/slurm/gpumond-taskprolog.sh in slurm.conf. For each line "export NAME=VALUE" that this script
# prints, Slurm sets the variable in the task. To opt out, set GPUMOND_AGENT=0 in the job's environment.
# GPUMOND_AGENT_DIRECTORY is the directory of `pip install --target DIRECTORY gpumond`.
directory=${GPUMOND_AGENT_DIRECTORY:-/opt/gpumond-agent}
inject=$directory/gpumond/agent/inject

[ -z "${GPUMOND_AGENT-}" ] || exit 0
gpus=${CUDA_VISIBLE_DEVICES-}${ROCR_VISIBLE_DEVICES-}${ZE_AFFINITY_MASK-}${SLURM_JOB_GPUS-}${SLURM_STEP_GPUS-}
[ -n "$(printf %s "$gpus" | sed 's/NoDevFiles//g')" ] || exit 0  # NoDevFiles: Slurm's value for a task without GPUs
[ -d "$inject" ] || exit 0

echo "export GPUMOND_AGENT=1"
echo "export PYTHONPATH=$inject${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${GPUMOND_WORKLOAD-}" ] && [ -n "${SLURM_JOB_NAME-}" ]; then
  echo "export GPUMOND_WORKLOAD=$(printf %s "$SLURM_JOB_NAME" | tr -cd 'A-Za-z0-9._-' | cut -c1-64)"
fi
exit 0
