#!/usr/bin/env bash
# Stand-ins for the base images on a machine without a registry, from Debian's packages, under the names that compose.yaml
# and worker/Dockerfile use; for Grafana there is none.
#   tests/compose/base_images.sh        needs root, debootstrap, Docker and a Debian mirror; 0.9 GB
# They trust the authorities that this machine trusts. They share with the real ones the names, the users and directories
# that ours rely on, and the versions as far as Debian has them: Python 3.11, Redis 8.0, Prometheus 2.53.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# system SUITE PACKAGES: a small Debian with these packages in $work/SUITE
system() {
  debootstrap --variant=minbase --include="$2,ca-certificates" "$1" "$work/$1" > "$work/$1.log" || {
    tail -n 20 "$work/$1.log" >&2
    exit 1
  }
  cp /etc/ssl/certs/ca-certificates.crt "$work/$1/etc/ssl/certs/ca-certificates.crt"
  rm -rf "$work/$1"/var/cache/apt/* "$work/$1"/var/lib/apt/lists/* "$work/$1"/usr/share/{doc,man,locale}
}

# image SUITE NAME CHANGE...: the directory as an image
image() {
  local suite=$1 name=$2 changes=()
  shift 2
  for change in "$@"; do changes+=(--change "$change"); done
  tar --directory "$work/$suite" --exclude ./dev --exclude ./proc --exclude ./sys --create . |
    docker import "${changes[@]}" - "$name"
}

system bookworm python3,python3-venv,python3-pip,python-is-python3
rm "$work"/bookworm/usr/lib/python3.11/EXTERNALLY-MANAGED
image bookworm python:3.11-slim 'CMD ["python3"]'

system trixie redis-server,prometheus
# The official images' users and directories: a volume takes over the owner of the directory that it is mounted on.
chroot "$work/trixie" sh -c 'groupmod -g 999 redis && usermod -u 999 redis'
chroot "$work/trixie" sh -c 'install -d -o redis -g redis /data && install -d -o nobody -g nogroup /prometheus'
image trixie redis:8 'WORKDIR /data' 'VOLUME /data' 'EXPOSE 6379' 'CMD ["redis-server"]'
image trixie "$(grep --only-matching 'prom/prometheus:.*' compose.yaml)" \
  'USER nobody' 'WORKDIR /prometheus' 'VOLUME /prometheus' 'EXPOSE 9090' 'ENTRYPOINT ["/usr/bin/prometheus"]'
