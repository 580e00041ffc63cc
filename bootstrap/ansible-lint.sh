#!/usr/bin/env bash
# ansible-lint, with one process for the syntax of all playbooks and roles.
#
# ansible-lint starts ansible-playbook for each of them, more than a hundred times; a start takes about as long as the
# check. Here it gets a stand-in that notes what was to be checked. Ansible then checks all of that at once.
set -euo pipefail
NOTES=$(mktemp -d)
export NOTES
trap 'rm -rf "$NOTES"' EXIT
mkdir "$NOTES/bin"
# The last word is a playbook of this tree, or ansible-lint's own one for a role, which it deletes afterwards.
cat >"$NOTES/bin/ansible-playbook" <<'END'
#!/bin/sh
[ "$1" = --syntax-check ] || exit 2
for playbook; do :; done
export -p | grep '^export ANSIBLE_' >"$NOTES/$$" && mv "$NOTES/$$" "$NOTES/environment"
case $playbook in
/*) grep -v '^---$' "$playbook" >>"$NOTES/roles.yml" ;;
*) echo "$playbook" >>"$NOTES/playbooks" ;;
esac
END
chmod 755 "$NOTES/bin/ansible-playbook"
PATH=$NOTES/bin:$PATH ansible-lint --offline

# shellcheck source=/dev/null
source "$NOTES/environment"
mapfile -t playbooks <"$NOTES/playbooks"
ansible-playbook --syntax-check "${playbooks[@]}" "$NOTES/roles.yml" >"$NOTES/log" 2>&1 || { cat "$NOTES/log"; exit 1; }
echo "ansible-playbook --syntax-check: ${#playbooks[@]} playbooks, $(grep -c import_role "$NOTES/roles.yml") roles"
