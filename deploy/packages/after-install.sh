# After the installation and after an upgrade. The environment is created on the machine, from wheels of the package,
# because it belongs to one version of Python.
running=false
[ ! -d /run/systemd/system ] || running=true
! $running || systemctl stop gpumond.service gpumond.socket 2>/dev/null || true
systemd-sysusers gpumond.conf
systemd-tmpfiles --create gpumond.conf || true
chgrp gpumond /etc/gpumond/gpumond.yaml
python3 -m venv --clear /opt/gpumond
/opt/gpumond/bin/python3 -m pip install --quiet --no-index --disable-pip-version-check --root-user-action=ignore \
  --find-links /usr/lib/gpumond/wheels 'gpumond[daemon,kubernetes]'
systemctl enable gpumond.socket gpumond.service
if $running; then
  systemctl daemon-reload
  systemctl start gpumond.socket gpumond.service
fi
