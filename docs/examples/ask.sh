#!/bin/sh
# Asks, waits for the answer and prints the job as JSON. Needs curl.
#
#   BACKBURNER_API_URL=https://… BACKBURNER_API_KEY=bb_… sh ask.sh '{"prompt": "Name a river."}'
set -eu

api() {
    curl --silent --show-error --fail-with-body --max-time 60 --retry 5 \
        --header "Authorization: Bearer $BACKBURNER_API_KEY" "$@"
}

value() { # of a field of the job on standard input, whose own fields come before what you sent
    grep -o "\"$1\":\"[^\"]*\"" | head -n 1 | cut -d '"' -f 4
}

# With the key, a request that is sent again, by --retry or by you, is the same job.
accepted=$(api "$BACKBURNER_API_URL/jobs" --data "$1" \
    --header 'Content-Type: application/json' --header "Idempotency-Key: $(date +%s)-$$")
job_id=$(printf '%s' "$accepted" | value job_id)

# Answered as soon as something happens, or after the wait; some deployments do not wait at all, hence the sleep.
while job=$(api "$BACKBURNER_API_URL/jobs/$job_id?wait=20"); do
    case $(printf '%s' "$job" | value status) in
    queued | processing) sleep 1 ;;
    *) break ;;
    esac
done
printf '%s\n' "$job"
