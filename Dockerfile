# One image for every pod. Layers go from what changes least to what changes with every commit. No weights and no
# secrets are in it, and nothing of it lies under the volume's mount point, which would hide it.
FROM debian:bookworm-slim

# ca-certificates: downloads over https.
# python3, python3-venv: Debian 12's own Python 3.11; there is no other in the image.
# gcc, libc6-dev, python3-dev: torch.compile builds its launchers at run time, on the pod.
# tini: PID 1 that reaps orphans and passes signals on.
# openssh-server: a way in when PUBLIC_KEY is set. The host keys that its installation makes are removed, as every
# container would have the same ones; start.sh makes them anew.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates \
        gcc \
        libc6-dev \
        openssh-server \
        python3 \
        python3-dev \
        python3-venv \
        tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

# NVIDIA_*: what the container runtime of the host mounts in (the driver's library and nvidia-smi). Everything else of
# CUDA comes with torch.
# PYTHONSAFEPATH: the working folder is not searched for modules; a volume's own jobs/ must not be taken for ours.
ENV PATH=/opt/fluxpod/venv/bin:$PATH \
    FLUXPOD_VOLUME=/workspace \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1

# Gigabytes, nearly all of it torch with CUDA; made anew only when a pin changes.
COPY requirements.txt /opt/fluxpod/
RUN python3 -m venv /opt/fluxpod/venv \
    && pip install --no-cache-dir --disable-pip-version-check -r /opt/fluxpod/requirements.txt

COPY entrypoint/start.sh /opt/fluxpod/
COPY entrypoint/supervisord.conf /etc/

# The application: about a megabyte, the one layer that most releases change.
COPY . /tmp/source
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /tmp/source \
    && rm -rf /tmp/source

LABEL org.opencontainers.image.title=fluxpod \
    org.opencontainers.image.licenses=Apache-2.0

ENTRYPOINT ["/usr/bin/tini", "--", "/opt/fluxpod/start.sh"]
