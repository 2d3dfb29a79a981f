# One image for every pod. Layers go from what changes least to what changes with every commit, so that a release moves
# about 20 MB. No weights but flux-tiny's and no secrets are in it, and nothing of it lies under the volume's mount point,
# which would hide it. Built by `make push`. The figures below are compressed sizes: every gigabyte is minutes of pulling on a
# billed pod.

# The pins of torch and of what torch needs, by themselves: the layer of gigabytes below depends on these lines alone,
# not on the rest of requirements.txt. (The CUDA wheels and triton are tied to one version each by torch's metadata.)
FROM debian:bookworm-slim AS pins
COPY requirements.txt /
RUN grep -E '^(torch|filelock|fsspec|Jinja2|MarkupSafe|mpmath|networkx|setuptools|sympy|typing_extensions)==' \
        /requirements.txt > /torch.txt

FROM debian:bookworm-slim

# ca-certificates: downloads over https.
# python3, python3-venv: Debian 12's own Python 3.11; there is no other in the image.
# gcc, libc6-dev, python3-dev: torch.compile builds its launchers at run time, on the pod.
# fonts-dejavu-core: the captions on the sheet of `fluxpod check --preview`; Pillow's own letters are English only.
# tini: PID 1 that reaps orphans and passes signals on.
# openssh-server: a way in when PUBLIC_KEY is set. The host keys that its installation makes are removed, as every
# container would have the same ones; start.sh makes them once for each volume.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates \
        fonts-dejavu-core \
        gcc \
        libc6-dev \
        openssh-server \
        python3 \
        python3-dev \
        python3-venv \
        tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && sed -i '1i . /etc/profile.d/fluxpod.sh' /etc/bash.bashrc

# NVIDIA_*: what the container runtime of the host mounts in (the driver's library and nvidia-smi). Everything else of
# CUDA comes with torch.
# PYTHONSAFEPATH: the working folder is not searched for modules; a volume's own jobs/ must not be taken for ours.
ENV PATH=/opt/fluxpod/venv/bin:$PATH \
    FLUXPOD_VOLUME=/workspace \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1

# torch with CUDA: gigabytes, nearly all of the image; made anew only when one of its pins changes.
# The package index's own torch is built for CUDA 13, which needs a host with driver 580 or newer. It is the default:
# nothing has to be named for it, and our figures were measured with it. What it leaves out are hosts whose driver is
# older; how many those are is not known, so the template asks the platform for CUDA 13 hosts only, and the plan checks
# the driver and says what to choose. For older hosts there is TORCH_INDEX: the address of PyTorch's own index of an
# older CUDA (its "Get started" page has them; they end in cu126 or the like), searched beside the usual one. Its wheels
# count as newer than the same version without such an ending. `make push TORCH_INDEX=...` puts the ending into the tag.
# Dropped: the test programs of torch, sympy and networkx (52 MB).
ARG TORCH_INDEX=
COPY --from=pins /torch.txt /opt/fluxpod/
RUN python3 -m venv /opt/fluxpod/venv \
    && pip install --no-cache-dir --disable-pip-version-check -r /opt/fluxpod/torch.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    && site=/opt/fluxpod/venv/lib/python3.11/site-packages \
    && rm -rf "$site/torch/test" "$site"/torch/bin/test_* \
    && find "$site/sympy" "$site/networkx" -type d -name tests -prune -exec rm -rf {} +

# All other packages, 190 MB. 40 of it are JupyterLab with the 77 packages that it brings: uploads and a terminal for
# people who have a browser and nothing else.
# Dropped: bitsandbytes for other CUDA versions than torch's (38 MB), and how a thousand locales write dates, which
# Jupyter would need for translations that are not here (10 MB).
COPY requirements.txt /opt/fluxpod/
RUN pip install --no-cache-dir --disable-pip-version-check -r /opt/fluxpod/requirements.txt \
    && site=/opt/fluxpod/venv/lib/python3.11/site-packages \
    && major=$(python -c 'import torch; print((torch.version.cuda or "13").partition(".")[0])') \
    && find "$site/bitsandbytes" -name 'libbitsandbytes_*.so' -not -name '*_cpu.so' -not -name "*_cuda$major*" -delete \
    && find "$site/babel/locale-data" -name '*.dat' -not -name 'en*' -not -name root.dat -delete

# 20 MB that change when flux-tiny is trained anew.
COPY bootstrap/flux_tiny_weights /opt/fluxpod/flux_tiny_weights

COPY entrypoint/start.sh /opt/fluxpod/
COPY entrypoint/supervisord.conf /etc/
COPY entrypoint/sshd.conf /etc/ssh/sshd_config.d/fluxpod.conf
COPY entrypoint/login.sh /etc/profile.d/fluxpod.sh
COPY entrypoint/volume_modules.pth /opt/fluxpod/venv/lib/python3.11/site-packages/zz-fluxpod-volume.pth

# The application, about 1 MB: the one layer that most releases change. What it is made from comes from outside, and
# flux-tiny's weights from the layer above, so that neither is in the image twice.
RUN --mount=type=bind,target=/tmp/context \
    cp -r /tmp/context /tmp/source \
    && pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /tmp/source \
    && rm -rf /tmp/source \
    && weights=/opt/fluxpod/venv/lib/python3.11/site-packages/bootstrap/flux_tiny_weights \
    && rm -r "$weights" \
    && ln -s /opt/fluxpod/flux_tiny_weights "$weights"

ARG VERSION=0
LABEL org.opencontainers.image.title=fluxpod \
    org.opencontainers.image.version=$VERSION \
    org.opencontainers.image.licenses=Apache-2.0

EXPOSE 22 7860 8888

ENTRYPOINT ["/usr/bin/tini", "--", "/opt/fluxpod/start.sh"]
