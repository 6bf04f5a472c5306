#!/bin/sh
# keep.sh COMMAND...: runs the command again whenever it fails or is killed, as long as Ray is there, unless it fails at
# once again and again. It is for `alignedserve serve` on the head of a cluster, where nothing else starts it again.
at_once=0
while began=$(date +%s); "$@"; status=$?; [ $status -ne 0 ]; do
  echo "$(date -u +%FT%TZ) it ended with status $status"
  if [ $(($(date +%s) - began)) -lt 20 ]; then at_once=$((at_once + 1)); else at_once=0; fi
  if [ $at_once -ge 5 ]; then echo "it fails at once: giving up"; exit 1; fi
  sleep 3
  RAY_AUTH_MODE=token "$(dirname "$1")/ray" health-check > /dev/null 2>&1 || { echo "Ray is gone"; exit 1; }
  echo "starting it again"
done
