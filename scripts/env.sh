# Sourced by the other scripts. `make_env run` makes the checkout's .venv when pyproject.toml or
# requirements.lock changed since; `make_env test` does so with what the tests need.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"

fail() { echo "$*" >&2; exit 1; }

# The first Python 3.11 to 3.13 with a working venv module: by name on PATH, then among pyenv's versions.
find_python() {
  local candidate without_venv=""
  for candidate in python3 python3.13 python3.12 python3.11 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[123].*/bin/python3; do
    "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      2>/dev/null || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    without_venv="${without_venv:-$candidate}"
  done
  if [ -n "$without_venv" ]; then
    fail "$without_venv has no venv module; install it: apt-get install python3-venv"
  fi
  fail "no Python 3.11, 3.12 or 3.13 found; install one: apt-get install python3 python3-venv"
}

make_env() {
  local extra="$1" stamp state interpreter target="$root"
  stamp="$root/.venv/.made-for-$extra"
  state="$root $(cat "$root/pyproject.toml" "$root/requirements.lock" | sha256sum)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then return; fi

  echo "making $root/.venv, this takes some minutes the first time" >&2
  if ! "$python" -c 'import pip' 2>/dev/null; then
    interpreter="$(find_python)" || exit 1
    "$interpreter" -m venv --clear "$root/.venv" || fail "$interpreter -m venv failed, see above"
  fi
  if [ "$extra" = test ]; then target="$root[test]"; fi
  "$python" -m pip install -qq --disable-pip-version-check \
    --constraint "$root/requirements.lock" --editable "$target" ||
    fail "pip could not install the engine, see above"
  echo "$state" > "$stamp"
  if [ "$extra" = test ]; then echo "$state" > "$root/.venv/.made-for-run"; fi
}
