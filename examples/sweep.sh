#!/bin/sh
# Four trainings, at most two at a time, each on a GPU of its own.  They outlive this terminal: close it if you like.
set -e
job=$(gpuguard submit --parsable --sweep steps=1,2 --sweep memory=1GiB,2GiB --at-most 2 --retries 1 -- \
  python "$(dirname "$0")/train.py" --step-time 10ms --steps '{steps}' --memory '{memory}')
gpuguard jobs wait "$job" # its exit code is the first one that is not 0
gpuguard jobs --tasks
