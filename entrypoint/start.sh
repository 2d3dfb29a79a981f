#!/bin/bash
# The container's entry, under tini. With arguments it becomes that command (`docker run IMAGE bash`); without any it
# keeps supervisord running, and with it everything in supervisord.conf. It ends only when it is told to: were PID 1 to
# end by itself, the platform would restart the container and go on billing.
set -euo pipefail

export FLUXPOD_VOLUME="${FLUXPOD_VOLUME:-/workspace}"
# The container's own disk is small, and wiped at every stop.
export HF_HOME="${HF_HOME:-$FLUXPOD_VOLUME/cache/huggingface}"
export FLUXPOD_SSH_PORT="${FLUXPOD_SSH_PORT:-22}"
export FLUXPOD_SSHD=false

if [ "$#" -gt 0 ]; then
    exec "$@"
fi

prepare_sshd() {
    mkdir -p /run/sshd &&
        ssh-keygen -q -A && # host keys of this container's own: the image has none
        install -d -m 700 /root/.ssh &&
        printf '%s\n' "$PUBLIC_KEY" > /root/.ssh/authorized_keys &&
        chmod 600 /root/.ssh/authorized_keys
}

if [ -z "${PUBLIC_KEY:-}" ]; then
    echo "ssh: off, because PUBLIC_KEY is not set"
elif prepare_sshd; then
    FLUXPOD_SSHD=true
else
    echo "ssh: off, because its keys could not be prepared; the reason stands above" >&2
fi

stopping=
supervisor=

stop() {
    stopping=yes
    [ -z "$supervisor" ] || kill -TERM "$supervisor" 2> /dev/null || true
}
trap stop TERM INT

mkdir -p /run/fluxpod
while [ -z "$stopping" ]; do
    supervisord --nodaemon --configuration /etc/supervisord.conf &
    supervisor=$!
    while kill -0 "$supervisor" 2> /dev/null; do
        wait "$supervisor" || true # comes back early when a signal arrives
    done
    if [ -z "$stopping" ]; then
        echo "supervisord has ended (killed for memory?); starting it again" >&2
        sleep 2
    fi
done
