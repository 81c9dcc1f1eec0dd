#!/bin/sh
# Twelve trainings overnight, at most four at a time.  The data of seed 3 is missing, which shows in the morning.
#
#     sh examples/overnight.sh evening    submits them and drops one.  Then close the laptop.
#     sh examples/overnight.sh morning    says what became of them, and tries those that have failed again
set -e
case $1 in
evening)
  mkdir -p data
  touch data/1 data/2 data/4
  job=$(gpuguard submit --parsable --hold --sweep lr=0.1,0.01,0.001 --sweep seed=1,2,3,4 --at-most 4 -- \
    sh "$0" train '{lr}' '{seed}')
  gpuguard jobs --tasks # twelve lines, and what would start
  gpuguard cancel "$job.11"
  gpuguard jobs unhold "$job"
  echo "Job $job runs without you: close the laptop."
  ;;
morning)
  gpuguard jobs wait @ || true # @ is the last job; the exit code says that not all is well
  gpuguard jobs
  gpuguard jobs log @.2 # why one of them has failed
  touch data/3
  gpuguard jobs retry --failed @
  gpuguard jobs wait @ || true
  gpuguard jobs --tasks # eleven have completed, and one was cancelled
  ;;
train) # stands for your training: sh overnight.sh train LR SEED
  test -e "data/$3" || { echo "there is no data/$3"; exit 3; }
  sleep "${STEP:-0.5}"
  echo "trained with lr $2 and seed $3 on GPU $CUDA_VISIBLE_DEVICES"
  ;;
esac
