# Sourced by scripts/test, after setup.sh: what the storage tests talk to, the page's browser and the metrics' reader. Installs
# what is missing where that is possible; where it is not, says so, and pytest skips those tests with a reason.

install_services() {
  local missing=()
  command -v redis-server >/dev/null || command -v valkey-server >/dev/null \
    || missing+=(redis-server)
  PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep 'libibverbs\.so\.1' >/dev/null \
    || missing+=(libibverbs1)
  command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
  command -v prometheus >/dev/null || missing+=(prometheus)
  if [ ${#missing[@]} -gt 0 ]; then
    install_debian "${missing[@]}"
  fi
  if ! .venv/bin/python -c 'import mooncake' 2>/dev/null; then
    say "installing headwater[mooncake]"
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mooncake]" \
      || say "could not install headwater[mooncake]; its tests are skipped"
  fi
}

install_debian() {  # $@: packages
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    say "not installed: $* (that needs root and apt-get); tests that need them are skipped"
    return
  fi
  say "installing $*"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null 2>&1 \
    || say "could not install $*; tests that need them are skipped"
}

install_services
