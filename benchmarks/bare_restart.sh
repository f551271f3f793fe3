#!/usr/bin/env bash
# The restart that people write today, for a job of two processes on one machine: start both,
# and when both have ended and one of them failed, start both again.
#
#     bare_restart.sh PYTHON DIRECTORY PORT [flags of benchmarks.bare_restart]
python=$1 directory=$2 port=$3
shift 3
until
  echo "$(date +%s.%N) import" >>"$directory/marks-loop"
  "$python" -m benchmarks.bare_restart --dir "$directory" --port "$port" --process 0 "$@" &
  first=$!
  "$python" -m benchmarks.bare_restart --dir "$directory" --port "$port" --process 1 "$@" &
  second=$!
  wait $first
  codes=$?
  wait $second
  codes="$codes $?"
  echo "$(date +%s.%N) ended $codes" >>"$directory/marks-loop"
  [[ $codes == "0 0" ]]
do :; done
