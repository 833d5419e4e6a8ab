# After the installation and after an upgrade. The environment is created on the machine, from wheels of the package,
# because it belongs to one version of Python. It is built beside the present one, which stays in use if this fails.
root=${DPKG_ROOT:-}
environments=$root/opt/gpumond.d
present=$(readlink "$root/opt/gpumond" || true)
running=false
[ ! -d "$root/run/systemd/system" ] || running=true
systemd-sysusers gpumond.conf
systemd-tmpfiles --create gpumond.conf || true
chgrp gpumond "$root/etc/gpumond/gpumond.yaml"
mkdir -p "$environments"
new=$(mktemp -d "$environments/XXXXXXXX")
trap 'rm -rf "$new"' EXIT
chmod 755 "$new"
python3 -m venv "$new"
# A variable, because pip before 22.1 (Ubuntu 22.04) refuses an option that it doesn't know.
PIP_ROOT_USER_ACTION=ignore "$new/bin/python3" -m pip install --quiet --no-index --disable-pip-version-check \
  --find-links "$root/usr/lib/gpumond/wheels" 'gpumond[daemon,kubernetes]'
"$new/bin/gpumond" --version > /dev/null
trap - EXIT
[ -L "$root/opt/gpumond" ] || rm -rf "$root/opt/gpumond"
ln -sfn "gpumond.d/$(basename "$new")" "$root/opt/gpumond.new"
mv -T "$root/opt/gpumond.new" "$root/opt/gpumond"
systemctl enable gpumond.socket gpumond.service
if $running; then
  systemctl daemon-reload
  systemctl stop gpumond.service gpumond.socket 2>/dev/null || true
  systemctl start gpumond.socket gpumond.service
fi
[ -z "$present" ] || rm -rf "$root/opt/$present"
