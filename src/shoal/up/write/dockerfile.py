"""``shoal up --write dockerfile``: an image with the installed wheel, whose command is `shoal`."""

TEXT = """\
# An image for all processes of an online system: docker build -t shoal:latest .
# It installs the wheel in dist/ (make wheel), or what WHEEL names: --build-arg WHEEL=shoal for one from an index.
# TORCH_INDEX takes torch from another index: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu is smaller.
FROM python:3.12-slim
ARG WHEEL=/wheels/shoal-*.whl
ARG TORCH_INDEX=
COPY dist*/ /wheels/
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch --index-url "$TORCH_INDEX"; fi \\
    && pip install --no-cache-dir $(for one in $WHEEL; do echo "$one[cli,server,train,zookeeper]"; done) \\
    && rm -rf /wheels
RUN useradd --create-home shoal && mkdir /data && chown shoal /data
USER shoal
WORKDIR /home/shoal
VOLUME /data
ENTRYPOINT ["shoal"]
CMD ["--help"]
"""


def text() -> str:
    """The file ``Dockerfile``."""
    return TEXT
