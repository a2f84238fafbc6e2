# Sourced by the other scripts: makes .venv once, and again only when its inputs change.
# After `. scripts/setup.sh`, PATH starts with .venv/bin and the current folder is the project root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[headwater] %s\n' "$*"; }
die() { printf '[headwater] error: %s\n' "$*" >&2; exit 1; }

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || die "$PYTHON not found; install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "Python 3.11 or newer is needed, and $PYTHON is $("$PYTHON" -V 2>&1); set PYTHON=/path/to/python"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null \
  || die "$PYTHON has no venv module; on Debian: apt-get install python3-venv"

# What an install depends on; the stamp holds its digest, so an unchanged tree installs nothing.
install_digest() { cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1; }

install_headwater() {  # $1: extras
  local stamp=".venv/.installed-${1//,/-}" digest installed
  digest=$(install_digest)
  for installed in "$stamp"*; do  # an installation with more extras is enough
    if [ -x .venv/bin/python ] && [ "$(cat "$installed" 2>/dev/null)" = "$digest" ]; then
      return
    fi
  done
  [ -x .venv/bin/python ] || { say "creating .venv"; "$PYTHON" -m venv .venv; }
  # torch first and alone: a dependency asking for "torch" would otherwise bring CUDA builds.
  say "installing torch: on PyPI with CUDA's libraries, some GB. Without a GPU, 200 MB are enough:"
  say "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash $0"
  .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch \
    || die "could not install torch; see pip's message above"
  say "installing headwater[$1]"
  .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]" \
    || die "could not install headwater[$1]; see pip's message above"
  echo "$digest" > "$stamp"
}

# More threads than cores make torch on a CPU many times slower, never faster.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PATH="$PWD/.venv/bin:$PATH"
