#!/bin/bash
# The container's entry, under tini. With arguments it becomes that command (`docker run IMAGE bash`); without any it
# keeps supervisord running, and with it everything in supervisord.conf. It ends only when it is told to: were PID 1 to
# end by itself, the platform would restart the container and go on billing. So no failure ends this script (no set -e),
# and nothing here may wait for ever: a volume can hang.
set -uo pipefail

run=/run/fluxpod
own_keys=$run/ssh
mkdir -p "$run"

# The environment as every program gets it; see entrypoint/environment.py. Its notes go to standard error.
prepare_environment() {
    local changes
    if changes=$(timeout --kill-after 2 30 python -m entrypoint.environment "$@"); then
        eval "$changes"
    else
        echo "environment: it could not be prepared; the reason stands above. Going on with what is needed to get in." >&2
    fi
    # What must be set even then.
    export FLUXPOD_VOLUME="${FLUXPOD_VOLUME:-/workspace}"
    export HF_HOME="${HF_HOME:-$FLUXPOD_VOLUME/cache/huggingface}"
    export FLUXPOD_SSH_PORT="${FLUXPOD_SSH_PORT:-22}"
    export FLUXPOD_PAGE_PORT="${FLUXPOD_PAGE_PORT:-7860}"
    export FLUXPOD_JUPYTER_PORT="${FLUXPOD_JUPYTER_PORT:-8888}"
}

if [ "$#" -gt 0 ]; then
    prepare_environment --command
    exec "$@"
fi

# supervisord opens /dev/stdout anew for every program. For a pipe that is the same pipe again; a plain file it would
# write over from its beginning, and a socket cannot be opened at all. So standard output is always a pipe.
output=
if [ ! -p /dev/stdout ]; then
    exec > >(
        trap '' INT TERM # the last words are said after these
        exec cat
    )
    output=$!
fi

# A host key for sshd, kept on the volume: with a new one after every restart ssh clients cry "possible attack". It is
# copied to the container, since sshd wants mode 600 and a volume may not hold modes.
prepare_host_key() {
    local name="ssh_host_$1_key"
    local own="$own_keys/$name" kept="$FLUXPOD_VOLUME/.fluxpod/ssh/$name"
    rm -f "$own"
    if timeout 5 cp "$kept" "$own" 2> /dev/null && chmod 600 "$own" && ssh-keygen -y -P '' -f "$own" > "$own.pub" 2> /dev/null; then
        return 0
    fi
    rm -f "$own" # absent on the volume, or damaged
    ssh-keygen -q -t "$1" -N '' -C fluxpod -f "$own" || return 1
    # shellcheck disable=SC2016 # the inner shell expands them
    timeout 5 sh -c 'mkdir -p -m 700 "${2%/*}" && cp "$1" "$2.$3" && mv -f "$2.$3" "$2"' keep "$own" "$kept" "$$" ||
        echo "ssh: the host key could not be kept on the volume; clients will complain after the next restart" >&2
}

prepare_sshd() (
    umask 077
    mkdir -p /run/sshd "$own_keys" /root/.ssh &&
        printf '%s\n' "$PUBLIC_KEY" > /root/.ssh/authorized_keys &&
        chmod 755 /run/sshd && chmod 700 /root/.ssh && chmod 600 /root/.ssh/authorized_keys || return 1
    ssh-keygen -l -f /root/.ssh/authorized_keys > /dev/null 2>&1 ||
        echo "ssh: PUBLIC_KEY is no public key (the content of a .pub file, 'ssh-ed25519 AAAA...'): nobody can log in" >&2
    prepare_host_key ed25519 && prepare_host_key ecdsa
)

prepare_environment

export FLUXPOD_SSHD=false FLUXPOD_JUPYTER=false
if [ -z "${PUBLIC_KEY:-}" ]; then
    echo "ssh: off, because PUBLIC_KEY is not set"
elif prepare_sshd; then
    FLUXPOD_SSHD=true
    echo "ssh: port $FLUXPOD_SSH_PORT${RUNPOD_TCP_PORT_22:+, from outside: ssh root@${RUNPOD_PUBLIC_IP:-ADDRESS} -p $RUNPOD_TCP_PORT_22}"
else
    echo "ssh: off, because its keys could not be prepared; the reason stands above" >&2
fi
if [ -n "${FLUXPOD_PASSWORD:-}${JUPYTER_PASSWORD:-}" ]; then
    echo "page: port $FLUXPOD_PAGE_PORT"
else
    echo "page: port $FLUXPOD_PAGE_PORT, but it shows nothing until FLUXPOD_PASSWORD is set"
fi
if [ -n "${JUPYTER_PASSWORD:-}" ]; then
    FLUXPOD_JUPYTER=true
    echo "jupyter: port $FLUXPOD_JUPYTER_PORT"
else
    echo "jupyter: off, because JUPYTER_PASSWORD is not set"
fi

stopping=
supervisor=

# The first TERM stops everything in order. The second one is for the jobs alone, which then leave at once:
# supervisord, already stopping, would not pass it on.
stop() {
    if [ -z "$stopping" ]; then
        stopping=yes
        [ -z "$supervisor" ] || kill -TERM "$supervisor" 2> /dev/null || true
    else
        kill -TERM "$(cat "$run/pod.pid")" 2> /dev/null || true
    fi
}
trap stop TERM INT

while [ -z "$stopping" ]; do
    rm -f "$run/pod.pid" # a number of a former life may be anyone's now
    supervisord --nodaemon --configuration /etc/supervisord.conf &
    supervisor=$!
    while kill -0 "$supervisor" 2> /dev/null; do
        wait "$supervisor" # comes back early when a signal arrives
    done
    if [ -z "$stopping" ]; then
        echo "supervisord has ended (killed for memory?); starting it again" >&2
        sleep 2
    fi
done

case "${TMPDIR:-}" in
    "$FLUXPOD_VOLUME"/cache/tmp/?*) rm -rf -- "$TMPDIR" ;;
esac

if [ -n "$output" ]; then
    exec >&2 # what is still in the pipe is written out before PID 1 ends, and everything with it
    for _ in $(seq 20); do
        kill -0 "$output" 2> /dev/null || break
        sleep 0.1
    done
fi
