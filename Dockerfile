# An image for all processes of an online system: docker build -t shoal:latest .
# It installs the wheel in dist/ (make wheel); --build-arg WHEEL=shoal installs one from an index instead.
# For a smaller image with torch for CPUs only: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim
ARG WHEEL=/wheels/shoal-*.whl
ARG TORCH_INDEX=
COPY dist*/ /wheels/
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch --index-url "$TORCH_INDEX"; fi \
    && pip install --no-cache-dir $(for one in $WHEEL; do echo "$one[cli,server,train,zookeeper]"; done) \
    && rm -rf /wheels
RUN useradd --create-home shoal && mkdir /data && chown shoal /data
USER shoal
WORKDIR /home/shoal
VOLUME /data
ENTRYPOINT ["shoal"]
CMD ["--help"]
