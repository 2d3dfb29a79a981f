# For shells on the pod: what the container's programs have in their environment, less the secrets that a shell has no
# use for. Read by login shells and by bash for `ssh HOST COMMAND`. The file is root's own (mode 600).
# shellcheck shell=sh disable=SC1091
if [ -r /run/fluxpod/login ]; then
    . /run/fluxpod/login
fi
